"""From mean answer log-probs at boundaries to values: how ready the model is to answer.

Every transform here is relative to the first boundary, so the first value is exactly 0 and the
differences of values over turns telescope to the last value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_pl.errors import ConfigError, CreditError

ROUNDING_NATS = 1e-6
"""A log-prob this far above 0 is the rounding of a sure answer and counts as 0."""


class ValueTransform(ABC):
    """Maps the mean log-probs of one rollout to the values of its boundaries.

    A log-prob of the answer is no good measure of progress: from -6 to -3 and from -0.6 to -0.3 the
    agent has each time halved what it lacks, yet the first step looks ten times as large. A
    transform decides which steps count the same. All of them are zero at the prompt, so that a
    value says what the turns have brought and not how well the model knew the answer before.

    A base class and no Protocol: configs choose an instance by class path, and a protocol with
    ``__call__`` would there mean "any callable that returns a tensor".
    """

    @abstractmethod
    def __call__(self, mean_logprobs: Tensor) -> Tensor:
        """Return (N + 1,) values, the first exactly 0, of (N + 1,) mean log-probs in nats."""


@torch.no_grad()
def log_ratio_values(mean_logprobs: Tensor, epsilon: float = 0.1) -> Tensor:
    """Return the log-ratio by which the remaining gap to the answer has shrunk.

    Implements the value of TRACE (arXiv 2607.13988):

        d_k = -l_k + eps        V_k = log(d_0 / d_k)

    where l is ``mean_logprobs`` and eps is ``epsilon``. A step from l = -0.6 to -0.3 is worth about
    as much as one from -6 to -3. The paper makes eps part of the definition: it bounds the reward
    for being ever more sure, and is no guard against division by zero.

    Args:
        mean_logprobs: (N + 1,) mean log-prob of the answer at each boundary, in nats.
        epsilon: gap that remains when the answer is certain, in nats, above 0.

    Returns:
        (N + 1,) values in nats, in the dtype of the input; the first is exactly 0.

    Raises:
        CreditError: if a log-prob is missing, not finite or positive.
        ConfigError: if ``epsilon`` is not a positive number.
    """
    gaps = _remaining_gaps(mean_logprobs, epsilon)
    return torch.log(gaps[0] / gaps)


@torch.no_grad()
def raw_logprob_values(mean_logprobs: Tensor) -> Tensor:
    """Return the plain gain in log-prob since the prompt, an ablation of the paper.

    Implements the raw log-prob delta of TRACE (arXiv 2607.13988, ablations):

        V_k = l_k - l_0

    Args:
        mean_logprobs: (N + 1,) mean log-prob of the answer at each boundary, in nats.

    Returns:
        (N + 1,) values in nats, in the dtype of the input; the first is exactly 0.

    Raises:
        CreditError: if a log-prob is missing, not finite or positive.
    """
    logprobs = checked_mean_logprobs(mean_logprobs)
    return logprobs - logprobs[0]


@torch.no_grad()
def linear_gap_values(mean_logprobs: Tensor, epsilon: float = 0.1) -> Tensor:
    """Return the share of the first gap that has been closed, an ablation of the paper.

    Implements the linear remaining gap of TRACE (arXiv 2607.13988, ablations):

        d_k = -l_k + eps        V_k = (d_0 - d_k) / d_0

    Args:
        mean_logprobs: (N + 1,) mean log-prob of the answer at each boundary, in nats.
        epsilon: gap that remains when the answer is certain, in nats, above 0.

    Returns:
        (N + 1,) values without unit, below 1, in the dtype of the input; the first is exactly 0.

    Raises:
        CreditError: if a log-prob is missing, not finite or positive.
        ConfigError: if ``epsilon`` is not a positive number.
    """
    gaps = _remaining_gaps(mean_logprobs, epsilon)
    return (gaps[0] - gaps) / gaps[0]


@torch.no_grad()
def probability_values(mean_logprobs: Tensor) -> Tensor:
    """Return the gain in the answer's probability since the prompt.

    The information gain of IGPO (arXiv 2510.14967) is the difference of two of these, and the last
    one is the reward of RLPR (arXiv 2506.18254) before it is cut to 0 .. 1:

        V_k = exp(l_k) - exp(l_0)

    Args:
        mean_logprobs: (N + 1,) mean log-prob of the answer at each boundary, in nats.

    Returns:
        (N + 1,) values without unit, in -1 .. 1, in the dtype of the input; the first is exactly 0.

    Raises:
        CreditError: if a log-prob is missing, not finite or positive.
    """
    probabilities = checked_mean_logprobs(mean_logprobs).exp()
    return probabilities - probabilities[0]


@dataclass(frozen=True, slots=True)
class LogRatioValue(ValueTransform):
    """:func:`log_ratio_values` as a setting."""

    epsilon: float = 0.1

    def __post_init__(self) -> None:
        _require_positive(self.epsilon)

    def __call__(self, mean_logprobs: Tensor) -> Tensor:
        """Return :func:`log_ratio_values` of ``mean_logprobs``."""
        return log_ratio_values(mean_logprobs, self.epsilon)


@dataclass(frozen=True, slots=True)
class RawLogprobValue(ValueTransform):
    """:func:`raw_logprob_values` as a setting."""

    def __call__(self, mean_logprobs: Tensor) -> Tensor:
        """Return :func:`raw_logprob_values` of ``mean_logprobs``."""
        return raw_logprob_values(mean_logprobs)


@dataclass(frozen=True, slots=True)
class LinearGapValue(ValueTransform):
    """:func:`linear_gap_values` as a setting."""

    epsilon: float = 0.1

    def __post_init__(self) -> None:
        _require_positive(self.epsilon)

    def __call__(self, mean_logprobs: Tensor) -> Tensor:
        """Return :func:`linear_gap_values` of ``mean_logprobs``."""
        return linear_gap_values(mean_logprobs, self.epsilon)


@dataclass(frozen=True, slots=True)
class ProbabilityValue(ValueTransform):
    """:func:`probability_values` as a setting."""

    def __call__(self, mean_logprobs: Tensor) -> Tensor:
        """Return :func:`probability_values` of ``mean_logprobs``."""
        return probability_values(mean_logprobs)


@torch.no_grad()
def checked_mean_logprobs(mean_logprobs: Tensor, owner: str = "the input") -> Tensor:
    """Return the log-probs with rounding above 0 removed, once they are known to be log-probs.

    Args:
        mean_logprobs: (N + 1,) mean log-prob of the answer at each boundary, in nats.
        owner: whose they are, for the message, e.g. ``rollout q7/3``.

    Returns:
        (N + 1,) the same, at most 0.

    Raises:
        CreditError: names ``owner`` and the first boundary that is not finite or is positive.
    """
    if mean_logprobs.dim() != 1 or len(mean_logprobs) == 0:
        raise CreditError(
            f"Expected one mean log-prob for each boundary of {owner}, got a tensor of shape "
            f"{list(mean_logprobs.shape)}. Check the prober."
        )
    bad = (~mean_logprobs.isfinite() | (mean_logprobs > ROUNDING_NATS)).nonzero()
    if len(bad):
        boundary = int(bad[0])
        raise CreditError(
            f"Expected a finite mean log-prob of at most 0 at boundary {boundary} of {owner}, got "
            f"{mean_logprobs[boundary].item()}. Check the scorer."
        )
    return mean_logprobs.clamp(max=0.0)


def _remaining_gaps(mean_logprobs: Tensor, epsilon: float) -> Tensor:
    _require_positive(epsilon)
    return epsilon - checked_mean_logprobs(mean_logprobs)


def _require_positive(epsilon: float) -> None:
    if not 0.0 < epsilon < float("inf"):
        raise ConfigError(
            f"Expected a value epsilon above 0, got {epsilon}. The paper uses epsilon=0.1."
        )
