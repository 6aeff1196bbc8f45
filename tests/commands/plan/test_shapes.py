"""Parameter counts from a config alone."""

import pytest
from random_models import make_llama, make_qwen3, make_qwen3_moe

from trace_pl.commands.plan.shapes import Counts, read_shape, shape_of
from trace_pl.errors import ConfigError
from trace_pl.models.adapters import LoRA


def test_the_known_models_have_the_parameters_of_their_cards():
    dense = read_shape("Qwen/Qwen3-4B-Thinking-2507")
    assert (dense.total, dense.active) == (4_022_468_096, 4_022_468_096)
    mixture = read_shape("Qwen/Qwen3-30B-A3B-Thinking-2507")
    assert mixture.total == 30_532_122_624
    assert mixture.active == pytest.approx(3.35e9, rel=0.005)


@pytest.mark.parametrize("make", [make_qwen3, make_llama, make_qwen3_moe])
def test_a_config_alone_gives_the_counts_of_the_model_that_was_saved(make, tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    shape = read_shape(str(tmp_path))
    assert shape.total == shape.trained == model.num_parameters()
    assert shape == shape_of(model, str(tmp_path))


def test_every_kind_of_a_mixture_is_counted():
    shape = shape_of(make_qwen3_moe())
    assert shape.counts == Counts(
        embedding=97 * 32,
        head=97 * 32,
        attention=2 * (2 * 32 * 32 + 2 * 32 * 16),
        experts=2 * 4 * 3 * 32 * 16,
        router=2 * 4 * 32,
        norm=2 * (2 * 32 + 2 * 8) + 32,
    )
    assert shape.active == shape.total - shape.counts.experts // 2
    assert shape.outside_layers == 2 * 97 * 32 + 32


def test_a_tied_head_is_counted_once_and_multiplied_all_the_same():
    shape = shape_of(make_qwen3(tie_word_embeddings=True))
    assert (shape.counts.head, shape.counts.embedding) == (0, 97 * 32)
    assert shape.head == 97 * 32


def test_an_adapter_is_all_that_is_trained():
    shape = read_shape("Qwen/Qwen3-4B-Thinking-2507", LoRA(rank=16))
    assert shape.trained == shape.counts.adapter == 33_030_144
    assert shape.base == 4_022_468_096


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_shape(str(tmp_path))
