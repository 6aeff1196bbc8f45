"""Importance weights for what the engine sampled with slightly other numbers than the trainer's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_pl.errors import ConfigError
from trace_pl.losses.inputs import LossInputs

WEIGHT_CAP = 2.0
"""Importance weights above it are counted; the default cap of the corrections."""


@dataclass(frozen=True)
class ImportanceCorrection(ABC):
    """Weighs tokens by how much likelier the trainer finds them than the engine that sampled.

    A policy gradient assumes that the policy being trained drew the tokens. The engine drew them,
    with other kernels and perhaps older weights; importance weights, the probability of the trainer
    over that of the engine, make up for it. They are unbiased and can be huge, so each correction
    cuts them off at a cap, which trades a little bias for bounded variance.

    Args:
        cap: Largest weight, at least 1.

    Raises:
        ConfigError: if ``cap`` is below 1.
    """

    cap: float = WEIGHT_CAP

    def __post_init__(self) -> None:
        if not self.cap >= 1.0:
            raise ConfigError(
                f"Expected a cap of at least 1 in model.loss.init_args.correction, got {self.cap}."
            )

    @abstractmethod
    def weights(self, inputs: LossInputs) -> Tensor:
        """Return constant (B, T) or (B, 1) weights, at least 0."""


@dataclass(frozen=True)
class TruncatedTokenWeights(ImportanceCorrection):
    """Truncated importance sampling per token.

    Implements

        w_it = min(exp(old_it - sampler_it), cap)
    """

    def weights(self, inputs: LossInputs) -> Tensor:
        """Return (B, T) weights."""
        return _log_weights(inputs).exp().clamp(max=self.cap)


@dataclass(frozen=True)
class OffPolicyTokenWeights(TruncatedTokenWeights):
    """:class:`TruncatedTokenWeights` where they are needed, and 1 on strictly on-policy rows.

    Rows are off-policy when an older policy sampled them, or when the epoch takes more than one
    step.
    """

    def weights(self, inputs: LossInputs) -> Tensor:
        """Return (B, T) weights."""
        if inputs.is_on_policy:
            return torch.ones_like(inputs.logprobs_BT)
        return super().weights(inputs)


@dataclass(frozen=True)
class TruncatedSequenceWeights(ImportanceCorrection):
    """Truncated importance sampling per rollout: unbiased up to the cap, but with more variance.

    Implements

        w_i = min(exp(sum_t (old_it - sampler_it)), cap)
    """

    def weights(self, inputs: LossInputs) -> Tensor:
        """Return (B, 1) weights."""
        return _log_weights(inputs).sum(dim=1, keepdim=True).exp().clamp(max=self.cap)


def _log_weights(inputs: LossInputs) -> Tensor:
    difference = inputs.old_logprobs_BT - inputs.sampler_logprobs_BT
    return difference.masked_fill(~inputs.mask_BT, 0.0).detach()
