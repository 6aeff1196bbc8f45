"""What a push needs, what is said when one goes wrong, and an engine that sleeps before it."""

import logging
import weakref

import pytest
import torch
from random_models import make_qwen3, perturb

from trace_pl.engines.transformers import HFEngine
from trace_pl.engines.vllm import internals, sleep
from trace_pl.engines.vllm.engine import VLLMEngine
from trace_pl.engines.vllm.sleep import Sleeper
from trace_pl.errors import RolloutError, WeightSyncError
from trace_pl.models.adapters import LoRA
from trace_pl.models.loading import load_model
from trace_pl.models.weights import policy_tensors
from trace_pl.rollout.parity import check_parity

PROMPT = list(range(3, 93))
SIZES = {"hidden_size": 64, "head_dim": 32, "max_position_embeddings": 512}


def make_engine(folder):
    return VLLMEngine(
        folder, 256, max_num_seqs=8, kv_cache_gib=0.06, num_threads=1, sleep_while_training=True
    )


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A Qwen3 with a tied head in a vLLM that was asked to sleep."""
    folder = str(tmp_path_factory.mktemp("qwen3_tied"))
    make_qwen3(**SIZES, tie_word_embeddings=True).save_pretrained(folder)
    engine = make_engine(folder)
    yield engine, folder
    engine.close()


def test_a_push_of_an_adapter_keeps_no_merged_copy(tied):
    """At any time about one layer's merged matrices are alive, never the whole model's."""
    engine, folder = tied
    policy = load_model(folder)
    own = {tensor.data_ptr() for tensor in policy.parameters()}
    LoRA(rank=4).attach(policy)
    perturb(policy, 1, "lora_B")
    alive, most, total = [], 0, 0

    def watched():
        nonlocal most, total
        for name, tensor in policy_tensors(policy):
            if tensor.data_ptr() not in own:
                total += tensor.nbytes
                alive.append(weakref.ref(tensor))
                most = max(most, sum(t.nbytes for ref in alive if (t := ref()) is not None))
            yield name, tensor

    engine.push_weights(watched(), version=1)
    assert check_parity(engine, policy, PROMPT).max_abs_diff < 1e-4
    assert 0 < most <= total / 2  # two layers


# --- wrong pushes ----------------------------------------------------------------------------

DAMAGED = (
    "embed_tokens", "input_layernorm", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm",
    "post_attention_layernorm", "gate_proj", "up_proj", "down_proj", "model.norm",
)  # fmt: skip


@pytest.mark.parametrize("part", DAMAGED)
def test_a_failed_parity_names_the_weight_that_is_wrong(tied, part):
    engine, folder = tied
    policy = load_model(folder)
    wrong = next(name for name, _ in policy.named_parameters() if part in name)
    pushed = ((n, t + 0.5 if n == wrong else t) for n, t in policy_tensors(policy))
    engine.push_weights(pushed, version=1)
    with pytest.raises(WeightSyncError) as error:
        check_parity(engine, policy, PROMPT)
    assert f"differ most: '{wrong}' by 0.5" in str(error.value)


def test_transformers_names_it_as_well(tied):
    _, folder = tied
    engine, policy = HFEngine(folder), load_model(folder)
    perturb(policy, 1, "layers.1.self_attn.v_proj")
    with pytest.raises(WeightSyncError, match=r"most: 'model\.layers\.1\.self_attn\.v_proj"):
        check_parity(engine, policy, PROMPT)


def is_head(module):
    return type(module).__name__ == "ParallelLMHead"


def test_a_head_that_was_left_behind_is_named(tied, monkeypatch):
    """What vLLM does by itself with a tied head on CPU."""
    engine, folder = tied
    policy = load_model(folder)
    engine.push_weights(policy_tensors(policy), version=1)
    perturb(policy, 1)
    pack = internals.pack
    monkeypatch.setattr(internals, "pack", lambda m: is_head(m) or pack(m))
    engine.push_weights(policy_tensors(policy), version=2)
    with pytest.raises(WeightSyncError, match=r"most: 'lm_head\.weight' by .*'[^']*' by 0,"):
        check_parity(engine, policy, PROMPT)


# --- sleep -----------------------------------------------------------------------------------


@pytest.fixture
def sleeper(tied, monkeypatch):
    """The calls that vLLM's own engine gets around a push, with memory that grows by ``freed``."""
    engine, _ = tied
    inner, calls, memory = engine._engine, [], {"free": 0, "freed": 100}

    def record(name):
        function = getattr(inner, name)

        def call(*args, **kwargs):
            detail = kwargs.get("tags") or kwargs.get("level") or ""
            calls.append(f"{name} {detail}".strip())
            memory["free"] += memory["freed"] * (name == "sleep")
            return function(*args, **kwargs)

        monkeypatch.setattr(inner, name, call)

    for name in ("sleep", "wake_up", "collective_rpc", "reset_prefix_cache"):
        record(name)
    monkeypatch.setattr(sleep, "free_bytes", lambda: memory["free"])
    monkeypatch.setattr(engine, "_sleeper", Sleeper(inner))
    return calls, memory


def test_weights_wake_before_the_push_and_the_cache_after_it(tied, sleeper):
    engine, folder = tied
    calls, _ = sleeper
    policy = load_model(folder)
    engine.push_weights(policy_tensors(policy), version=3)
    assert calls == ["collective_rpc", "reset_prefix_cache"]
    calls.clear()
    engine.sleep()
    engine.sleep()
    assert calls == ["sleep 2"]
    assert engine.version == -1  # whoever compares versions must push, for the weights are gone
    calls.clear()
    engine.push_weights(policy_tensors(policy), version=3)
    awake = ["wake_up ['weights']", "collective_rpc", "wake_up ['kv_cache']", "reset_prefix_cache"]
    assert calls == awake
    assert check_parity(engine, policy, PROMPT).max_abs_diff < 1e-4


def test_sleep_that_frees_nothing_is_an_error(tied, sleeper):
    engine, folder = tied
    _, memory = sleeper
    memory["freed"] = 0
    with pytest.raises(RolloutError, match=r"freed no memory .*\(0 bytes\)"):
        engine.sleep()
    engine.push_weights(policy_tensors(load_model(folder)), version=3)


def test_on_cpu_sleep_does_nothing_and_says_so_once(tied, caplog):
    """The last test: closing this engine takes the other one's process group down."""
    _, folder = tied
    with caplog.at_level(logging.WARNING, "trace_pl"):
        engine = make_engine(folder)
        try:
            engine.push_weights(policy_tensors(load_model(folder)), version=4)
            before = engine.prompt_logprobs(PROMPT)
            engine.sleep()
            engine.sleep()
            assert engine.version == 4
            assert torch.equal(engine.prompt_logprobs(PROMPT), before)
        finally:
            engine.close()
    assert caplog.text.count("`sleep_while_training` does nothing") == 1
