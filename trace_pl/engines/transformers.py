"""Sampling with transformers alone, where vLLM cannot be installed: slower, otherwise the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, TopPLogitsWarper

from trace_pl.engines.protocol import (
    Completion,
    EngineNeeds,
    FinishReason,
    GenerationRequest,
    RolloutEngine,
    SamplingSettings,
    stream_seed,
)
from trace_pl.errors import ConfigError, RolloutError
from trace_pl.models.experts import ChoiceRecorder
from trace_pl.models.loading import load_model
from trace_pl.models.logprobs import sampled_logprobs
from trace_pl.models.weights import model_tensors


class HFEngine(RolloutEngine):
    """A copy of the model that samples with ``generate``.

    A step samples whole responses for up to ``max_num_seqs`` waiting requests, so a fast trajectory
    waits for the slowest of its batch, and no prefix is kept between turns.

    Args:
        model: folder of a Hugging Face model, or a hub id ``owner/name``.
        max_model_len: most tokens of one sequence.
        max_num_seqs: requests of one step.
        temperature: temperature of sampling. Log-probs are those of the distribution sampled from.
        top_p: nucleus of sampling.
        dtype: number format.
        seed: seed of sampling; None takes torch's initial seed, which ``seed_everything`` sets.
        record_experts: whether completions say which experts of a mixture read each token, for
            ``model.experts.replay``.

    Raises:
        ConfigError: if the model cannot be loaded, the settings are no distribution, or a step
            would serve no request.
    """

    def __init__(
        self,
        model: str,
        max_model_len: int = 4096,
        max_num_seqs: int = 128,
        temperature: float = 1.0,
        top_p: float = 1.0,
        dtype: Literal["float32", "bfloat16"] = "float32",
        seed: int | None = None,
        record_experts: bool = False,
    ) -> None:
        if max_num_seqs < 1:
            raise ConfigError(
                f"Expected data.engine.init_args.max_num_seqs of at least 1, got {max_num_seqs}."
            )
        self.max_model_len = max_model_len
        self.record_experts = record_experts
        self.max_num_seqs = max_num_seqs
        self.settings = SamplingSettings(
            temperature, top_p, torch.initial_seed() if seed is None else seed
        )
        self.version = -1
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = load_model(model, dtype).eval().requires_grad_(False)
        torch.nn.Module.to(self._model, device)
        self.dtype = self._model.dtype
        # Penalties and the like that a model's folder asks for are no part of the policy.
        self._model.generation_config = GenerationConfig()
        self._waiting: list[GenerationRequest] = []

    @classmethod
    def needs(cls, settings: Mapping[str, Any]) -> EngineNeeds:
        """Return what it takes of a machine: a cache of every sequence at full length."""
        return replace(super().needs(settings), caches_full_length=True)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; it joins the next step."""
        self._waiting.append(request)

    def has_unfinished(self) -> bool:
        """Return whether :meth:`step` has work to do."""
        return bool(self._waiting)

    def cancel(self, request_ids: Collection[str]) -> None:
        """Forget requests that wait."""
        forgotten = set(request_ids)
        self._waiting = [r for r in self._waiting if r.request_id not in forgotten]

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """Sample the responses of the requests that wait longest."""
        batch = self._waiting[: self.max_num_seqs]
        if not batch:
            return []
        del self._waiting[: len(batch)]
        stops = {request.stop_token_ids for request in batch}
        assert len(stops) == 1, "one template, one set of stop tokens"
        longest = max(len(request.prompt_ids) for request in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        is_token = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            is_token[row, longest - len(request.prompt_ids) :] = 1
        sampler = _StreamSampler(self.settings, [request.stream for request in batch])
        recorder = ChoiceRecorder(self._model, len(batch)) if self.record_experts else None
        with recorder or nullcontext():
            sequences = self._model.generate(
                inputs=ids.to(self._model.device),
                attention_mask=is_token.to(self._model.device),
                generation_config=GenerationConfig(
                    do_sample=False,  # the sampler leaves one token possible
                    max_new_tokens=max(request.max_tokens for request in batch),
                    eos_token_id=list(stops.pop()),
                    pad_token_id=0,
                ),
                logits_processor=[sampler],
            )
        responses = sequences[:, longest:].tolist()
        logprobs = torch.stack(sampler.logprobs, dim=1).tolist()
        completions = [
            _cut(request, tokens, values)
            for request, tokens, values in zip(batch, responses, logprobs, strict=True)
        ]
        chosen_BTNK = None if recorder is None else recorder.choices()
        if chosen_BTNK is None:
            return completions
        return [
            replace(done, experts=_of_tokens(chosen_TNK, request, done, longest))
            for done, request, chosen_TNK in zip(completions, batch, chosen_BTNK, strict=True)
        ]

    @torch.no_grad()
    def push_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights in; see ``RolloutEngine.push_weights``.

        Raises:
            RolloutError: if requests wait, or the names are not those of the model.
        """
        self.require_idle()
        missing = dict(self._model.named_parameters())  # a tied head is named once
        for name, tensor in model_tensors(self._model, named_tensors):
            target = missing.pop(name, None)
            if target is None or target.shape != tensor.shape:
                raise RolloutError(
                    f"Expected the weights of the engine's model, got '{name}' of shape "
                    f"{list(tensor.shape)}. Give engine and policy the same model."
                )
            target.copy_(tensor)
        if missing:
            raise RolloutError(
                f"Expected every weight of the engine's model, got none for {sorted(missing)[:3]}. "
                "Give engine and policy the same model."
            )
        self.version = version

    @torch.no_grad()
    def weight_differences(self, named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
        """Compare each of the model's parameters; see ``RolloutEngine.weight_differences``."""
        held = dict(self._model.named_parameters())
        return {
            name: float((held[name] - tensor.to(held[name])).abs().max())
            for name, tensor in model_tensors(self._model, named_tensors)
        }

    @torch.no_grad()
    def prompt_logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """Return the log-prob of each token given those before it, at temperature 1."""
        ids = torch.tensor([list(token_ids)], device=self._model.device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[:, 0] = False
        return sampled_logprobs(self._model, ids, mask)[0, 1:].float().cpu()

    def close(self) -> None:
        """Free the model."""
        del self._model


class _StreamSampler(LogitsProcessor):
    """Draws each row's token from that row's own random numbers and notes its log-prob.

    The largest of log-probs plus independent Gumbel noise is a sample of the distribution, so the
    token is drawn here and everything else is ruled out for the caller.
    """

    def __init__(self, settings: SamplingSettings, streams: Sequence[str]) -> None:
        self.logprobs: list[Tensor] = []
        """(B,) float32 of each new token."""
        self._temperature = settings.temperature
        self._nucleus = TopPLogitsWarper(settings.top_p) if settings.top_p < 1.0 else None
        self._generators = [
            torch.Generator().manual_seed(stream_seed(settings.seed, stream)) for stream in streams
        ]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logits = scores.float() / self._temperature
        if self._nucleus is not None:
            logits = self._nucleus(input_ids, logits)
        logprobs_BV = logits.log_softmax(dim=-1)
        size = logprobs_BV.shape[1]
        uniform = torch.stack([torch.rand(size, generator=g) for g in self._generators])
        noise = -(-uniform.to(logits.device).clamp_min(1e-30).log()).log()
        chosen = (logprobs_BV + noise).argmax(dim=-1, keepdim=True)
        self.logprobs.append(logprobs_BV.gather(1, chosen)[:, 0].cpu())
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)


def _cut(request: GenerationRequest, tokens: list[int], logprobs: list[float]) -> Completion:
    """Return the part of a batch row that belongs to the request."""
    tokens = tokens[: request.max_tokens]
    stops = [at for at, token in enumerate(tokens) if token in request.stop_token_ids]
    length = stops[0] + 1 if stops else len(tokens)
    reason: FinishReason = "stop" if stops else "length"
    return Completion(request.request_id, tuple(tokens[:length]), tuple(logprobs[:length]), reason)


def _of_tokens(
    chosen_TNK: Tensor, request: GenerationRequest, done: Completion, longest: int
) -> Tensor:
    """Return the experts of a row without its padding; nothing read the last token."""
    start = longest - len(request.prompt_ids)
    return chosen_TNK[start : longest + len(done.token_ids) - 1].clone()
