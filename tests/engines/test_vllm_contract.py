"""What trace_pl relies on in vLLM beyond its documented interface, by name."""

import inspect
import re
from dataclasses import fields
from importlib import import_module, util
from pathlib import Path
from types import SimpleNamespace

import pytest

from trace_pl.engines.server.main import _SERVE
from trace_pl.engines.vllm.internals import parse_serve
from trace_pl.engines.vllm.setup import import_vllm, start_vllm

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def vllm():
    return import_vllm()


ENGINE = [
    "from_engine_args", "add_request", "step", "abort_request", "has_unfinished_requests",
    "collective_rpc", "reset_prefix_cache", "sleep", "wake_up", "is_sleeping",
]  # fmt: skip
MAPPINGS = ["stacked", "renaming", "regex", "substr", "prefix", "suffix"]
NAMES = [
    ("vllm.v1.engine.llm_engine", "LLMEngine", ENGINE),
    ("vllm.v1.engine.core_client", "EngineCoreClient", ["shutdown"]),
    ("vllm.v1.engine.utils", None, ["get_mp_context"]),
    ("vllm.v1.worker.worker_base", "WorkerBase", ["get_model"]),
    ("vllm.v1.worker.gpu_worker", "Worker", ["reload_weights"]),
    ("vllm.entrypoints.cli.serve", None, ["make_arg_parser", "FlexibleArgumentParser"]),
    ("vllm.entrypoints.cli.serve", "ServeSubcommand", ["validate", "cmd"]),
    ("vllm.model_executor.models.registry", "ModelRegistry", ["models", "register_model"]),
    ("vllm.model_executor.models.registry", "_LazyRegisteredModel", ["load_model_cls"]),
    ("vllm.model_executor.models.utils", "WeightsMapper", [f"orig_to_new_{m}" for m in MAPPINGS]),
    ("vllm.model_executor.models.llama", "LlamaForCausalLM", ["hf_to_vllm_mapper"]),
    ("vllm.model_executor.models.qwen3_moe", "Qwen3MoeForCausalLM", ["hf_to_vllm_mapper"]),
    ("vllm.model_executor.model_loader.reload", None,
     ["initialize_layerwise_reload", "finalize_layerwise_reload"]),
    ("vllm.distributed.parallel_state", None,
     ["destroy_model_parallel", "destroy_distributed_environment", "_WORLD", "_NODE_COUNT"]),
    ("vllm.distributed.weight_transfer.base", "WeightTransferEngine",
     ["init_transfer_engine", "start_weight_update", "receive_weights", "finish_weight_update"]),
    ("vllm.distributed.weight_transfer.factory", "WeightTransferEngineFactory",
     ["register_engine"]),
]  # fmt: skip
SET_IN = [
    ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", "layer.cpu_linear"),
    ("vllm.model_executor.layers.vocab_parallel_embedding", "UnquantizedEmbeddingMethod",
     "def process_weights_after_loading"),
    ("vllm.model_executor.layers.linear", "UnquantizedLinearMethod",
     "def process_weights_after_loading"),
    ("vllm.model_executor.layers.linear", "LinearBase", "self.quant_method"),
    ("vllm.model_executor.layers.linear", "ColumnParallelLinear", "self.output_partition_sizes"),
    ("vllm.model_executor.layers.fused_moe.fused_moe_method_base", "FusedMoEMethodBase",
     "self.moe_kernel"),
    ("vllm.v1.engine.llm_engine", "LLMEngine", "self.engine_core"),
    ("vllm.v1.worker.cpu_worker", "CPUWorker", "torch.set_num_threads ="),
]  # fmt: skip
ENDPOINTS = {
    "vllm.entrypoints.rl.online.api_router": {
        "/pause", "/resume", "/is_paused", "/init_weight_transfer_engine", "/start_weight_update",
        "/update_weights", "/finish_weight_update", "/weight_info",
    },
    "vllm.entrypoints.serve.dev.cache.api_router": {"/reset_prefix_cache"},
    "vllm.entrypoints.scale_out.token_in_token_out.api_router": {"/inference/v1/generate"},
}  # fmt: skip
INTERNAL = re.compile(
    r"cpu_linear|quant_method|moe_kernel|output_partition_sizes|hf_to_vllm_mapper|orig_to_new"
    r"|get_mp_context|engine_core|parallel_state|ModelRegistry|ServeSubcommand|make_arg_parser"
)


@pytest.mark.parametrize(("module", "owner", "names"), NAMES)
def test_names_are_there(vllm, module, owner, names):
    found = import_module(module)
    found = getattr(found, owner) if owner else found
    fields_of = getattr(found, "__dataclass_fields__", {})
    assert [name for name in names if not hasattr(found, name) and name not in fields_of] == []


@pytest.mark.parametrize(("module", "owner", "text"), SET_IN)
def test_attributes_are_still_set_where_they_were(vllm, module, owner, text):
    assert text in inspect.getsource(getattr(import_module(module), owner))


@pytest.mark.parametrize("module", ENDPOINTS)
def test_a_server_has_the_endpoints_that_it_is_asked_at(vllm, module):
    assert ENDPOINTS[module] <= {route.path for route in import_module(module).router.routes}


def test_internals_are_used_in_one_file():
    rooms = Path(__file__).parents[2] / "trace_pl"
    users = [p.name for p in rooms.rglob("*.py") if INTERNAL.search(p.read_text())]
    assert users == ["internals.py"]


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


def test_a_gpu_runs_the_model_runner_and_the_scheduler_that_are_tested_here(vllm, monkeypatch):
    assert vllm.envs.VLLM_USE_V2_MODEL_RUNNER is False
    config = import_module("vllm.config.vllm").VllmConfig
    assert "use_v2_model_runner = envs.VLLM_USE_V2_MODEL_RUNNER" in inspect.getsource(
        config.use_v2_model_runner.fget
    )
    assert parse_serve([*_SERVE, "model"]).async_scheduling is False
    found = start_vllm(
        SimpleNamespace(EngineArgs=dict, LLMEngine=SimpleNamespace(from_engine_args=dict)),
        "no-folder", 512, None, is_cpu=False,
    )  # fmt: skip
    assert found["async_scheduling"] is False
    assert {field.name for field in fields(vllm.EngineArgs)} >= {"async_scheduling"}


def test_an_engine_in_the_trainers_process_counts_devices_by_local_rank(vllm):
    executor = import_module("vllm.v1.executor.uniproc_executor")
    alone = inspect.getsource(executor.UniProcExecutor._distributed_args)
    assert "local_rank = int(device_info[1]) if len(device_info) > 1 else 0" in alone
    beside = inspect.getsource(executor.ExecutorWithExternalLauncher._distributed_args)
    assert 'local_rank = int(os.environ["LOCAL_RANK"])' in beside
