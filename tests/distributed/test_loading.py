"""Weights read slice by slice from safetensors."""

import json
import shutil

import pytest
import torch
from random_models import make_qwen3, make_qwen3_moe

from trace_pl.distributed.loading import ModelFiles, load_shards
from trace_pl.errors import ConfigError
from trace_pl.models.loading import load_model, model_on_meta


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe")
    make_qwen3_moe().save_pretrained(path, max_shard_size="20KB")
    return path


def empty_model(folder):
    model = model_on_meta(str(folder))
    rotary = model.get_decoder().rotary_emb
    model.to_empty(device="cpu")
    model.get_decoder().rotary_emb = rotary
    return model


def test_a_model_of_several_files_is_what_transformers_loads(folder):
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = empty_model(folder)
    load_shards(model, ModelFiles(str(folder)))
    expected = load_model(str(folder)).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_rows_of_packed_experts_are_those_of_single_experts(folder):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    expected = load_model(str(folder)).state_dict()[name]
    found = ModelFiles(str(folder)).read(name, 1, 3)
    assert torch.equal(found, expected[1:3])


def test_a_missing_file_a_missing_weight_and_another_shape_are_named(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    lost = index["weight_map"]["lm_head.weight"]
    (broken / lost).unlink()
    with pytest.raises(ConfigError, match=lost):
        load_shards(empty_model(broken), ModelFiles(str(broken)))
    with pytest.raises(ConfigError, match=r"'model\.unknown'"):
        ModelFiles(str(folder)).read("model.unknown", 0, 1)
    other = make_qwen3(hidden_size=64, num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"rows 0 to 97 of 'model\.embed_tokens\.weight'"):
        load_shards(other, ModelFiles(str(folder)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="got neither"):
        ModelFiles(str(tmp_path / "empty"))
