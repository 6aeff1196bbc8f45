"""Policy losses: small classes for the config slot ``model.loss``.

A loss turns log-probs and advantages of one micro-batch into a scalar. It divides by
``num_loss_tokens`` of the *whole* global batch, so the sum over micro-batches and ranks has the
gradient of one big batch, and a long rollout weighs as much per token as a short one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trace_pl.errors import ConfigError


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What a loss sees; all (B, T) float32 but the mask."""

    logprobs_BT: Tensor
    """Log-probs of the policy being trained, with gradient."""
    old_logprobs_BT: Tensor
    """Log-probs of the policy that sampled, constant."""
    advantages_BT: Tensor
    mask_BT: Tensor
    """Bool, true on sampled tokens."""
    num_loss_tokens: float
    """Sampled tokens of the whole global batch (all micro-batches, all ranks), at least 1."""


@dataclass(frozen=True, eq=False)
class LossOutputs:
    """The loss and what to log about it (sums over tokens, divided by the caller)."""

    loss: Tensor
    metrics: dict[str, Tensor]


class PolicyLoss(Protocol):
    """A policy-gradient objective."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Return the loss of this micro-batch."""


@dataclass(frozen=True)
class TokenClip:
    """Per-token clipped surrogate of GRPO.

    Implements the objective of TRACE (arXiv 2607.13988), Sec. 5, KL and entropy weights 0:

        ratio_t = exp(logp_t - old_logp_t)
        loss = -(1/M) sum_t min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t)

    with M the sampled tokens of the global batch.

    Args:
        clip_low: How far the ratio may fall below 1.
        clip_high: How far the ratio may rise above 1.

    Raises:
        ConfigError: if a clip range is not positive or ``clip_low`` reaches 1.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        if not 0.0 < self.clip_low < 1.0 or not self.clip_high > 0.0:
            raise ConfigError(
                "Expected clip_low in (0, 1) and clip_high above 0 in model.loss, got "
                f"{self.clip_low} and {self.clip_high}."
            )

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Return the surrogate and the share of clipped tokens."""
        mask = inputs.mask_BT
        # Masked positions hold no log-prob; zero them before exp so that they can not make a NaN.
        log_ratio = (inputs.logprobs_BT - inputs.old_logprobs_BT).masked_fill(~mask, 0.0)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        advantages = inputs.advantages_BT
        surrogate = torch.minimum(ratio * advantages, clipped * advantages).masked_fill(~mask, 0.0)
        is_clipped = (clipped * advantages < ratio * advantages) & mask
        # k3 estimator of KL(old || new): never negative, low variance.
        divergence = (ratio - 1.0 - log_ratio).masked_fill(~mask, 0.0)
        return LossOutputs(
            loss=-surrogate.sum() / inputs.num_loss_tokens,
            metrics={
                "clip_fraction": is_clipped.sum().detach() / inputs.num_loss_tokens,
                "policy_kl": divergence.sum().detach() / inputs.num_loss_tokens,
            },
        )
