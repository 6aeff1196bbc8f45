"""vLLM inside the trainer's process, on GPU or CPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trace_pl.engines.protocol import (
    Completion,
    GenerationRequest,
    RolloutEngine,
    SamplingSettings,
)
from trace_pl.engines.vllm.host_process import guest_compute, kept_state, quiet_output
from trace_pl.engines.vllm.internals import stop_engine
from trace_pl.engines.vllm.setup import import_vllm, sampling_parameters, start_vllm
from trace_pl.engines.vllm.sleep import Sleeper
from trace_pl.engines.vllm.weights import load_weights, weight_differences
from trace_pl.errors import ConfigError, RolloutError
from trace_pl.models.names import resolve_model

logger = logging.getLogger(__name__)

# Asked before this module sets its own default.
_USER_WANTS_LOGS = "VLLM_LOGGING_LEVEL" in os.environ


class VLLMEngine(RolloutEngine):
    """A vLLM engine that shares process and device with the trainer.

    It runs in process: weights are pushed as tensors, without files or a server, and a start takes
    seconds. On CPU nothing is compiled, prompts are read in one piece and every request has its own
    random numbers. What vLLM would change in the process (random states, number of threads) is put
    back.

    Args:
        model: folder of a Hugging Face model, or a hub id ``owner/name``.
        max_model_len: most tokens of one sequence.
        max_num_seqs: sequences that are generated at the same time.
        kv_cache_gib: memory for keys and values in GiB, fractions allowed; None gives vLLM the
            share ``gpu_memory_utilization`` of the device.
        gpu_memory_utilization: share of the device's memory, for weights and cache together; used
            only if ``kv_cache_gib`` is None.
        temperature: temperature of sampling. Log-probs are those of the distribution sampled from.
        top_p: probability mass of the nucleus that is sampled from.
        dtype: number format; float32 matches a float32 trainer exactly.
        seed: seed of sampling; None takes torch's initial seed, which ``seed_everything`` sets.
        num_threads: CPU threads of the engine; None takes as many as torch has. For a tiny model,
            two save a quarter of the time on an idle machine and cost many times as much on a busy
            one, where they wait for each other after every operation.
        record_experts: whether completions say which experts of a mixture read each token, for
            ``model.experts.replay``. vLLM can do so on a GPU only, and there it is untried.
        sleep_while_training: whether vLLM frees its GPU memory after each rollout phase and takes
            it back for the next push. Untried on a GPU; on CPU it does nothing and says so.

    Raises:
        ConfigError: if vLLM is not installed, or model and cache do not fit.
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
        dtype: Literal["float32", "bfloat16", "auto"] = "float32",
        seed: int | None = None,
        num_threads: int | None = None,
        sleep_while_training: bool = False,
        record_experts: bool = False,
    ) -> None:
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.settings = SamplingSettings(
            temperature, top_p, torch.initial_seed() if seed is None else seed
        )
        self.version = -1
        self._num_threads = num_threads
        path = resolve_model(model)
        is_quiet = not _USER_WANTS_LOGS and Path(path).is_dir()  # a download shows its bar
        had_group = torch.distributed.is_initialized()
        with kept_state(), quiet_output(is_quiet):
            self._vllm = import_vllm()
            self._is_cpu = bool(self._vllm.platforms.current_platform.is_cpu())
            _require_gpu_to_record(record_experts, self._is_cpu)
            self._engine = start_vllm(
                self._vllm,
                path,
                max_model_len,
                kv_cache_gib,
                self._is_cpu,
                dtype=dtype,
                max_num_seqs=max_num_seqs,
                gpu_memory_utilization=gpu_memory_utilization,
                use_tqdm_on_load=not is_quiet,
                enable_sleep_mode=sleep_while_training and not self._is_cpu,
                enable_return_routed_experts=record_experts,
            )
        self.dtype = self._engine.model_config.dtype
        self._owns_group = torch.distributed.is_initialized() and not had_group
        self._sleeper = Sleeper(self._engine) if sleep_while_training and not self._is_cpu else None
        if sleep_while_training and self._is_cpu:
            logger.warning("vLLM cannot sleep on CPU: `sleep_while_training` does nothing.")

    # --- sampling ---------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; it joins the next step."""
        parameters = self._vllm.SamplingParams(
            **sampling_parameters(self.settings, request), **self._light_output()
        )
        self._add(request.request_id, request.prompt_ids, parameters, request.priority)

    def step(self) -> list[Completion]:
        """Advance every queued request by one token and return those that finished."""
        return [
            Completion(
                request_id=output.request_id,
                token_ids=tuple(output.outputs[0].token_ids),
                logprobs=tuple(output.outputs[0].logprobs.logprobs),
                finish_reason="stop" if output.outputs[0].finish_reason == "stop" else "length",
                experts=_recorded(output.outputs[0].routed_experts),
            )
            for output in self._step()
        ]

    def has_unfinished(self) -> bool:
        """Return whether :meth:`step` has work to do."""
        return bool(self._engine.has_unfinished_requests())

    def cancel(self, request_ids: Collection[str]) -> None:
        """Forget requests, and free their places in batch and cache."""
        if request_ids:
            self._engine.abort_request(list(request_ids))

    # --- weights ----------------------------------------------------------------------------

    def push_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights in and drop the prefixes cached with the old ones.

        Args:
            named_tensors: parameters by their names in a saved checkpoint; a tied head is left out.
            version: policy version of these weights.

        Raises:
            RolloutError: if requests are unfinished, for they would mix two policies.
        """
        self.require_idle()
        awake = self._sleeper.awake() if self._sleeper is not None else nullcontext()
        with guest_compute(self._num_threads, self._is_cpu):
            with awake:
                self._engine.collective_rpc(load_weights, args=(named_tensors,))
            is_reset = self._engine.reset_prefix_cache()
        if not is_reset:
            raise RolloutError("vLLM refused to drop the prefixes cached with the old weights.")
        self.version = version

    def sleep(self) -> None:
        """Free weights and cache until the next push, if ``sleep_while_training``.

        Raises:
            RolloutError: if requests are unfinished, or that frees no memory.
        """
        if self._sleeper is not None:
            self.require_idle()
            self._sleeper.sleep()
            self.version = -1  # no weights: the next phase must push, whatever their version

    def weight_differences(self, named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
        """Compare weights to what vLLM computes with; packed experts cannot be read."""
        found: dict[str, float]
        (found,) = self._engine.collective_rpc(weight_differences, args=(named_tensors,))
        return found

    def prompt_logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """Return the log-prob of each token given those before it, at temperature 1.

        Args:
            token_ids: T ids, at least 2 and fewer than ``max_model_len``.

        Returns:
            (T - 1,) float32 in nats.
        """
        assert not self.has_unfinished(), "scoring runs alone"
        parameters = self._vllm.SamplingParams(
            max_tokens=1, prompt_logprobs=0, seed=0, **self._light_output()
        )
        self._add("prompt-logprobs", token_ids, parameters)
        outputs: list[Any] = []
        while self.has_unfinished():
            outputs += self._step()
        found = outputs[0].prompt_logprobs
        return torch.tensor(
            [found[at][token].logprob for at, token in enumerate(token_ids) if at > 0]
        )

    def close(self) -> None:
        """Stop vLLM, and take down the process group if vLLM made it; once is enough."""
        if hasattr(self, "_engine"):
            stop_engine(self._engine, self._owns_group)
            del self._engine

    # --- details ----------------------------------------------------------------------------

    def _add(
        self, request_id: str, prompt_ids: Sequence[int], parameters: object, priority: int = 0
    ) -> None:
        prompt = {"prompt_token_ids": list(prompt_ids)}
        self._engine.add_request(request_id, prompt, parameters, priority=priority)

    def _step(self) -> list[Any]:
        with guest_compute(self._num_threads, self._is_cpu):
            return [output for output in self._engine.step() if output.finished]

    def _light_output(self) -> dict[str, Any]:
        """Return settings that keep Python work per token low."""
        kind = self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        return {"detokenize": False, "flat_logprobs": True, "output_kind": kind}


def _recorded(experts: np.ndarray | None) -> Tensor | None:
    return None if experts is None else torch.from_numpy(experts.astype(np.int16))


def _require_gpu_to_record(record_experts: bool, is_cpu: bool) -> None:
    if record_experts and is_cpu:
        raise ConfigError(
            "Expected a GPU for data.engine.init_args.record_experts of VLLMEngine, got none. Use "
            "trace_pl.engines.HFEngine."
        )
