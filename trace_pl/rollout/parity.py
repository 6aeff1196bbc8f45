"""Proof after each weight push that the engine samples from the trainer's policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trace_pl.engines.protocol import RolloutEngine
from trace_pl.errors import WeightSyncError
from trace_pl.models.experts import routers
from trace_pl.models.logprobs import sampled_logprobs
from trace_pl.models.weights import policy_tensors
from trace_pl.rollout.parity_limits import HIGH, LARGEST, MEAN, ParityLimits

PROMPT = (
    "Which page states the answer? Look for the bridge, the town and its mayor; read who built it, "
    "in which year, and for how much. If two pages disagree, prefer the newer one and say why. "
    "Then write down step by step the names, the dates, the numbers 3, 17 and 4,096, and a line of "
    "code such as `for item in items: print(item)`. Some words that are asked for rarely: "
    "kerosene, to whittle, Ljubljana, 0.25 mol/l. The last sentence is the answer and nothing else."
)
"""Enough tokens of many kinds for a mean and a high quantile, asked with the run's own tools."""


@dataclass(frozen=True, slots=True)
class ParityReport:
    """How far engine and trainer are apart: absolute differences of log-probs, in nats."""

    mean_abs_diff: float
    """Mean over tokens."""
    high_abs_diff: float
    """The 99th percentile; of fewer than 200 tokens what all but two stay below."""
    max_abs_diff: float
    """The largest."""
    limits: ParityLimits

    @classmethod
    def of(cls, found: Tensor, expected: Tensor, limits: ParityLimits) -> ParityReport:
        """Compare (T,) log-probs of the same tokens."""
        difference = (found - expected).abs()
        level = max(0.0, min(0.99, 1.0 - 2.0 / len(difference)))
        high = float(difference.quantile(level))
        return cls(float(difference.mean()), high, float(difference.max()), limits)

    @property
    def is_within(self) -> bool:
        """Whether a run may go on; never if a difference is not a number."""
        limits = self.limits
        return (
            self.mean_abs_diff <= limits.mean
            and self.high_abs_diff <= limits.high
            and (self.max_abs_diff <= limits.largest or not limits.is_largest_fatal)
        )

    def by_tag(self) -> dict[str, float]:
        """Return the three figures under the tags of their metrics."""
        return {LARGEST: self.max_abs_diff, MEAN: self.mean_abs_diff, HIGH: self.high_abs_diff}

    def __str__(self) -> str:
        """Return the three figures, each with its limit."""
        limits = self.limits
        largest = f"{self.max_abs_diff:.3g} nats"
        if limits.is_largest_fatal:
            return (
                f"{largest} (limit {limits.largest:.3g}), {self.mean_abs_diff:.3g} on average and "
                f"{self.high_abs_diff:.3g} in the 99th percentile"
            )
        return (
            f"{largest} (usual up to {limits.largest:.3g}), {self.mean_abs_diff:.3g} on average "
            f"(limit {limits.mean:.3g}) and {self.high_abs_diff:.3g} in the 99th percentile (limit "
            f"{limits.high:.3g})"
        )


def check_parity(
    engine: RolloutEngine,
    policy_model: PreTrainedModel,
    prompt_ids: Sequence[int],
    tolerance: float | None = None,
) -> ParityReport:
    """Compare both sides' log-probs of a fixed prompt.

    A push can succeed and still leave old or wrong weights behind (packed kernels, routers of
    experts, cached prefixes), so the result of every push is measured, never assumed.

    Args:
        engine: the engine that was given the weights.
        policy_model: the transformers model that gave them.
        prompt_ids: T token ids, at least 2.
        tolerance: largest allowed difference in nats; None limits mean and 99th percentile to what
            number formats and depth explain, and leaves the largest to whoever reads the report.

    Returns:
        The measured differences and their limits.

    Raises:
        WeightSyncError: if they are beyond the limits, or not numbers.
    """
    expected, dtype = _trainer_logprobs(policy_model, prompt_ids)
    limits = (
        ParityLimits.derived(
            {dtype, engine.dtype},
            policy_model.config.get_text_config().num_hidden_layers,
            bool(routers(policy_model)),
        )
        if tolerance is None
        else ParityLimits.of_tolerance(tolerance)
    )
    report = ParityReport.of(engine.prompt_logprobs(prompt_ids), expected, limits)
    if not report.is_within:
        raise WeightSyncError(
            "Expected the same log-probs from engine and trainer after pushing policy version "
            f"{engine.version}, got a difference of {report}, on {len(expected)} tokens; the "
            f"limits are those of {limits.reason}. {_compare(engine, policy_model)} Use one number "
            "format on both sides, float32 to see whether rounding explains it. If it does, set "
            "`data.parity_tolerance` to the largest difference that you accept; if not, use "
            "another engine for this architecture."
        )
    return report


@torch.no_grad()
def _trainer_logprobs(
    model: PreTrainedModel, prompt_ids: Sequence[int]
) -> tuple[Tensor, torch.dtype]:
    """Return the (T - 1,) log-probs of a prompt, and the number format they were computed in."""
    ids = torch.tensor([list(prompt_ids)], device=next(model.parameters()).device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    # Parameters do not tell: those of a sharded model are cast while they are gathered.
    formats: list[torch.dtype] = []
    hook = model.get_decoder().register_forward_hook(
        lambda _, __, output: formats.append(output.last_hidden_state.dtype)
    )
    try:
        logprobs = sampled_logprobs(model, ids, mask)[0, 1:].float().cpu()
    finally:
        hook.remove()
    return logprobs, formats[0]


def _compare(engine: RolloutEngine, policy_model: PreTrainedModel) -> str:
    """Say in which weights engine and trainer differ most."""
    if any(isinstance(parameter, DTensor) for parameter in policy_model.parameters()):
        # Gathering takes all ranks, and this one may be the only one that failed.
        return "The policy is sharded, so single weights were not compared."
    differences = engine.weight_differences(policy_tensors(policy_model))
    if not differences:
        return "The engine shows no weights to compare."
    worst = sorted(differences, key=lambda name: -_size(differences[name]))[:3]
    if _size(differences[worst[0]]) == 0.0:
        return (
            f"The {len(differences)} weights that the engine shows are equal, so another one is "
            "not, or it computes otherwise."
        )
    listed = ", ".join(f"'{name}' by {differences[name]:g}" for name in worst)
    return f"The weights that differ most: {listed}."


def _size(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference
