"""What trace_pl relies on in vLLM beyond its documented interface, by name."""

import inspect
from dataclasses import fields
from importlib import import_module, util

import pytest

from trace_pl.engines.vllm.setup import import_vllm

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def vllm():
    return import_vllm()


@pytest.mark.parametrize(
    ("module", "owner", "names"),
    [
        (
            "vllm.v1.engine.llm_engine", "LLMEngine",
            ["from_engine_args", "add_request", "step", "abort_request", "has_unfinished_requests",
             "collective_rpc", "reset_prefix_cache", "sleep", "wake_up", "is_sleeping"],
        ),
        ("vllm.v1.worker.worker_base", "WorkerBase", ["get_model"]),
        ("vllm.v1.worker.gpu_worker", "Worker", ["reload_weights"]),
        ("vllm.model_executor.models.utils", "WeightsMapper", ["orig_to_new_stacked"]),
        ("vllm.distributed.parallel_state", None,
         ["destroy_model_parallel", "destroy_distributed_environment"]),
        ("vllm.distributed.weight_transfer.factory", "WeightTransferEngineFactory",
         ["register_engine"]),
    ],
)  # fmt: skip
def test_names_are_there(vllm, module, owner, names):
    found = import_module(module)
    found = getattr(found, owner) if owner else found
    fields_of = getattr(found, "__dataclass_fields__", {})
    assert [name for name in names if not hasattr(found, name) and name not in fields_of] == []


def test_an_engine_takes_the_settings_that_it_is_given(vllm):
    known = {field.name for field in fields(vllm.EngineArgs)}
    assert {
        "kv_cache_memory_bytes", "gpu_memory_utilization", "distributed_executor_backend",
        "logprobs_mode", "enable_prefix_caching", "skip_tokenizer_init", "enable_sleep_mode",
        "enable_return_routed_experts", "enforce_eager", "enable_chunked_prefill", "block_size",
    } <= known  # fmt: skip


def test_log_probs_can_be_those_of_the_distribution_that_is_drawn_from(vllm):
    config = import_module("vllm.config.model")
    assert "processed_logprobs" in str(inspect.getsource(config))


def test_a_request_can_name_every_end_token_and_its_seed(vllm):
    parameters = vllm.SamplingParams(
        max_tokens=3, stop_token_ids=[5], ignore_eos=True, seed=1, logprobs=0, flat_logprobs=True
    )
    assert parameters.all_stop_token_ids == {5}
    assert parameters.ignore_eos


@pytest.mark.skipif(util.find_spec("triton") is None, reason="this vLLM came without Triton")
def test_triton_multiplies_float32_as_float32(vllm):
    assert import_module("triton.knobs").language.fp32_default == "ieee"
