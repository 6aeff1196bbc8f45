"""Names and values of pushed weights, without an engine."""

from itertools import pairwise

import pytest
import torch
from random_models import make_llama, make_qwen3, make_qwen3_moe
from safetensors.torch import load_file

from trace_pl.models.loading import load_model
from trace_pl.models.weights import checkpoint_tensors, model_tensors, policy_tensors

MODELS = [make_qwen3, make_llama, make_qwen3_moe]


@pytest.mark.parametrize("is_loaded", [True, False])
@pytest.mark.parametrize("make", MODELS)
def test_names_and_values_are_those_of_a_saved_checkpoint(make, is_loaded, tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    found = dict(policy_tensors(load_model(str(tmp_path)) if is_loaded else model))
    assert found.keys() == saved.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, saved[name]), name


def test_experts_have_one_tensor_each(tmp_path):
    names = [name for name, _ in policy_tensors(make_qwen3_moe())]
    assert sum(".experts." in name for name in names) == 2 * 4 * 3  # layers, experts, matrices
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in names


@pytest.mark.parametrize("make", MODELS)
def test_a_model_takes_back_what_it_gave(make, tmp_path):
    make().save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    named = dict(model.named_parameters())
    found = dict(model_tensors(model, checkpoint_tensors(model, named.items())))
    assert found.keys() == named.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, named[name]), name


def test_a_layer_is_given_before_the_next_is_read():
    model = make_qwen3_moe(num_hidden_layers=3)
    events = []

    def reading():
        for name, tensor in model.named_parameters():
            events.append(("read", name))
            yield name, tensor

    for name, _ in checkpoint_tensors(model, reading()):
        events.append(("given", name))
    layers = [name.split(".")[2] for what, name in events if what == "given" and ".layers." in name]
    assert layers == sorted(layers)
    # When a layer is given, at most one tensor of what follows was read.
    for (what, name), (next_what, next_name) in pairwise(events):
        if (what, next_what) == ("read", "given") and ".layers." in next_name:
            ahead = events[: events.index((what, name)) + 1]
            layer = int(next_name.split(".")[2])
            beyond = [n for w, n in ahead if w == "read" and f".layers.{layer + 1}." in n]
            assert len(beyond) <= 1
