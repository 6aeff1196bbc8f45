"""What the agent loop asks of an engine: sample continuations of token ids, take new weights."""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from trace_pl.errors import ConfigError, RolloutError

FinishReason = Literal["stop", "length"]

PREFILL_TOKENS = 8192
"""Most tokens that one step of vLLM on a GPU reads, prompts and sampled ones together."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Says how tokens are drawn; log-probs are those of the distribution that is drawn from."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    """Together with the stream of a request it fixes every draw of that request."""

    def __post_init__(self) -> None:
        if self.temperature <= 0.0:
            raise ConfigError(
                f"Expected a temperature above 0, got {self.temperature}. The paper samples at 1."
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"Expected top_p above 0 and up to 1, got {self.top_p}.")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One continuation to sample."""

    request_id: str
    """Unique among unfinished requests."""
    prompt_ids: Sequence[int]
    max_tokens: int
    """At least 1; the sampled stop token counts."""
    stop_token_ids: tuple[int, ...]
    """Sampling ends after any of these, which is kept; those of one template, see
    ``ChatTemplate.stop_ids``."""
    stream: str
    """Names the random numbers of this request: the same stream, weights and engine seed give the
    same tokens again, whatever else runs beside it (up to rounding)."""
    priority: int = 0
    """Where not all fit, lower numbers go first. One number for all requests of a rollout, and the
    lowest for the oldest, lets those that began keep their prefixes in the cache until they end."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled for one request."""

    request_id: str
    token_ids: tuple[int, ...]
    """At least one id; ends with a stop token exactly if ``finish_reason`` is "stop"."""
    logprobs: tuple[float, ...]
    """One log-prob per id, in nats."""
    finish_reason: FinishReason
    experts: Tensor | None = None
    """(R, N layers, K) int16, the experts that read each of the first R tokens of prompt and
    response; None if the engine does not record them."""


@dataclass(frozen=True, slots=True)
class EngineNeeds:
    """What an engine takes of a machine, known from its settings before it starts."""

    dtype: str = "auto"
    """Number format of weights and cache; "auto" is that of the model's files."""
    max_model_len: int = 4096
    """Most tokens of one sequence."""
    max_num_seqs: int = 128
    """Sequences that are generated at the same time."""
    kv_cache_gib: float | None = 1.0
    """Memory for keys and values in GiB; None where ``gpu_memory_utilization`` rules."""
    gpu_memory_utilization: float = 0.5
    """Share of a GPU's memory for weights and cache together."""
    tensor_parallel_size: int = 1
    """GPUs that hold one copy of the weights between them."""
    prefill_tokens: int = PREFILL_TOKENS
    """Most tokens that one step reads, whose forward takes memory beside the cache."""
    has_own_gpus: bool = False
    """Whether it computes on GPUs that the trainer does not use."""
    num_servers: int = 1
    """Servers that share the GPUs of its own evenly."""
    pushes_files: bool = False
    """Whether weights are written to files and read from there."""
    caches_full_length: bool = False
    """Whether the cache holds every sequence at full length, whatever is in it."""


class RolloutEngine(ABC):
    """A sampler that advances many requests together and can be given new weights.

    The agent loop submits a request for each response that it wants, and calls :meth:`step` until
    nothing is unfinished; requests join and leave at any step, so a rollout whose tool has answered
    never waits for the others. Between two phases the trainer pushes its weights. An engine of your
    own implements the abstract methods, counts ``version``, draws from :func:`stream_seed` alone so
    that a run can be repeated, and returns the log-probs of the distribution it drew from.

    A base class and not a protocol, so that the command line can check what a config names.
    """

    version: int
    """Policy version of the weights in use; -1 before the first push."""
    max_model_len: int
    """Most tokens of one sequence, prompt and continuation together."""
    max_num_seqs: int = 128
    """Sequences that it generates at the same time for this rank; more wait inside of it."""
    runs_apart: bool = False
    """Whether it computes in a process of its own, so that a thread can drive it while the trainer
    trains."""
    dtype: torch.dtype = torch.float32
    """Number format in which it computes, set by an engine that knows another: the check after a
    push allows for its rounding."""
    weight_dtype: torch.dtype | None = None
    """Number format to which it casts all weights that it is given, so that they may be gathered in
    it; None where it may keep some as they are."""

    @classmethod
    def needs(cls, settings: Mapping[str, Any]) -> EngineNeeds:
        """Return what an engine of these settings takes of a machine; nothing is started.

        It reads the names that :class:`EngineNeeds` has; an engine with other settings, or with
        other habits, overrides it.

        Args:
            settings: the ``init_args`` of a config; what is missing has the engine's default.
        """
        parameters = inspect.signature(cls).parameters.values()
        given = {p.name: p.default for p in parameters if p.default is not p.empty} | dict(settings)
        known = {field.name for field in fields(EngineNeeds)} & given.keys()
        return EngineNeeds(
            **{"has_own_gpus": cls.runs_apart, **{name: given[name] for name in known}}
        )

    @abstractmethod
    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; it joins the next step."""

    @abstractmethod
    def step(self) -> list[Completion]:
        """Advance every queued request and return those that finished, in any order."""

    @abstractmethod
    def has_unfinished(self) -> bool:
        """Return whether :meth:`step` has work to do."""

    @abstractmethod
    def cancel(self, request_ids: Collection[str]) -> None:
        """Forget requests, which then never come back; the tokens of all others stay the same.

        Args:
            request_ids: what to forget; ids of no unfinished request are ignored.
        """

    def require_idle(self) -> None:
        """Refuse a push that would mix two policies in one response.

        Raises:
            RolloutError: if requests are unfinished.
        """
        if self.has_unfinished():
            raise RolloutError(
                "Expected an idle engine for a weight push, got unfinished requests. Finish the "
                "rollouts of one policy version before the next."
            )

    @abstractmethod
    def push_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights in, and forget everything computed with the old ones.

        Args:
            named_tensors: parameters by their names in a saved checkpoint, read to the end; those
                of a layer come in one run, and a tied head is left out. An engine may keep them and
                read them again until the next push.
            version: policy version of these weights.

        Raises:
            RolloutError: if requests are unfinished, or the weights are of another model.
        """

    def weight_differences(self, named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
        """Compare what the engine computes with to the weights it should have.

        Args:
            named_tensors: as in :meth:`push_weights`.

        Returns:
            The largest absolute difference of each weight that the engine can show; none if it can
            show nothing.
        """
        return {}

    def sleep(self) -> None:  # noqa: B027  (an engine may have nothing to give)
        """Give the device's memory to the trainer until the next push.

        An engine that does so sets its version to -1, for its weights may be gone: it samples again
        only after a push.
        """

    @abstractmethod
    def prompt_logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """Return the log-prob of each token given those before it, at temperature 1.

        Args:
            token_ids: T ids, at least 2.

        Returns:
            (T - 1,) float32 CPU tensor in nats; entry t belongs to token t + 1.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what the engine holds; it cannot be used afterwards."""


def stream_seed(seed: int, stream: str) -> int:
    """Return a 63-bit seed that depends on the engine's seed and a request's stream."""
    digest = hashlib.sha256(f"{seed}/{stream}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
