"""Pushes into real engines of several architectures."""

from pathlib import Path

import pytest
from random_models import make_llama, make_qwen3_moe, perturb
from safetensors.torch import load_file, save_file

from trace_pl.engines.transformers import HFEngine
from trace_pl.engines.vllm.engine import VLLMEngine
from trace_pl.errors import WeightSyncError
from trace_pl.models.loading import load_model
from trace_pl.models.weights import policy_tensors
from trace_pl.rollout.parity import check_parity

PROMPT = list(range(3, 93))
SIZES = {"hidden_size": 64, "head_dim": 32, "max_position_embeddings": 512}
MODELS = {
    "llama": lambda: make_llama(**SIZES),
    "llama_tied": lambda: make_llama(**SIZES, tie_word_embeddings=True),
    "llama_tied_twice": lambda: make_llama(**SIZES, tie_word_embeddings=True),
    "qwen3_moe": lambda: make_qwen3_moe(**SIZES),
    "qwen3_moe_tied": lambda: make_qwen3_moe(
        **SIZES, tie_word_embeddings=True, moe_intermediate_size=32
    ),
}


def make_engine(folder, kind="vllm"):
    if kind == "transformers":
        return HFEngine(folder, 256, seed=3)
    return VLLMEngine(folder, 256, max_num_seqs=8, kv_cache_gib=0.06, seed=3, num_threads=1)


@pytest.fixture(
    scope="module", params=[*((name, "vllm") for name in MODELS), ("qwen3_moe", "transformers")]
)
def started(request, tmp_path_factory):
    """A vLLM with each model, transformers with experts; and the model's folder."""
    name, kind = request.param
    folder = str(tmp_path_factory.mktemp(name))
    MODELS[name]().save_pretrained(folder)
    if name == "llama_tied_twice":  # the head is in the file as well, as some tools write it
        path = Path(folder) / "model.safetensors"
        weights = load_file(path)
        save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, path)
    engine = make_engine(folder, kind)
    yield engine, folder
    engine.close()


def test_pushes_again_and_again_leave_the_trainers_weights(started):
    engine, folder = started
    policy = load_model(folder)
    engine.push_weights(policy_tensors(policy), version=0)
    assert check_parity(engine, policy, PROMPT).max_abs_diff < 1e-4
    parts = ["", "mlp.gate.", "experts", ""] if "moe" in folder else ["", "", "mlp"]
    for version, part in enumerate(parts, start=1):
        perturb(policy, version, part)
        with pytest.raises(WeightSyncError):
            check_parity(engine, policy, PROMPT)
        engine.push_weights(policy_tensors(policy), version)
        assert check_parity(engine, policy, PROMPT).max_abs_diff < 1e-4
        assert engine.version == version


@pytest.mark.parametrize("started", [("qwen3_moe", "vllm")], indirect=True)
def test_a_wrong_router_is_named_and_wrong_experts_are_owned_up_to(started):
    engine, folder = started
    policy = load_model(folder)
    for part, said in (
        ("layers.1.mlp.gate.", "most: 'model.layers.1.mlp.gate.weight' by "),
        ("layers.1.mlp.experts.2.up", "weights that the engine shows are equal"),
    ):
        pushed = ((n, 2 * t if part in n else t) for n, t in policy_tensors(policy))
        engine.push_weights(pushed, version=1)
        with pytest.raises(WeightSyncError) as error:
            check_parity(engine, policy, PROMPT)
        assert said in str(error.value)
