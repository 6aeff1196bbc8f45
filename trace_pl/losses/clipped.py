"""The clipped surrogate, with the ratio of each token (GRPO) or of the whole rollout (GSPO)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trace_pl.errors import ConfigError
from trace_pl.losses.corrections import ImportanceCorrection, OffPolicyTokenWeights
from trace_pl.losses.inputs import LossInputs, LossOutputs, PolicyLoss
from trace_pl.losses.kl import KLPenalty
from trace_pl.losses.normalisers import Normaliser, TokenMean


@dataclass(frozen=True)
class ClippedLoss(PolicyLoss):
    """Clipped policy-gradient surrogate.

        loss = -sum_it w_it c_it min(r_it A_it, clip(r_it, 1 - clip_low, 1 + clip_high) A_it)

    with w the normaliser's weights, c the correction for the sampler (1 without one), and r the
    ratio of the policy to what it was, which each child defines.

    Args:
        clip_low: How far the ratio may fall below 1, in (0, 1).
        clip_high: How far the ratio may rise above 1, above 0.
        normaliser: What a token weighs in the global batch.
        correction: Importance weights between the policy that sampled and the one at the start of
            the epoch; None for none. The default weighs only what is not strictly on-policy.
        kl: Penalty for leaving the reference; None for none.

    Raises:
        ConfigError: if a clip range is not positive or ``clip_low`` reaches 1.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    normaliser: Normaliser = field(default_factory=TokenMean)
    correction: ImportanceCorrection | None = field(default_factory=OffPolicyTokenWeights)
    kl: KLPenalty | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.clip_low < 1.0 or not self.clip_high > 0.0:
            raise ConfigError(
                "Expected clip_low in (0, 1) and clip_high above 0 in model.loss, got "
                f"{self.clip_low} and {self.clip_high}."
            )

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the reference's log-probs."""
        return self.kl is not None

    @abstractmethod
    def log_ratio(self, difference_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Return the (B, T) log of the ratio, with gradient, from log pi - log pi_old.

        Args:
            difference_BT: zero where nothing was sampled.
            mask_BT: true on sampled tokens.
        """

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Return the loss, the share of clipped tokens and how far the policy has moved."""
        mask, advantages = inputs.mask_BT, inputs.advantages_BT
        # Masked positions hold no log-prob; zero them before exp so that they cannot make a NaN.
        difference = (inputs.logprobs_BT - inputs.old_logprobs_BT).masked_fill(~mask, 0.0)
        ratio = self.log_ratio(difference, mask).exp()
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)
        weights = self.normaliser.weights(inputs)
        metrics = {}
        if self.correction is not None:
            correction = self.correction.weights(inputs)
            surrogate = correction * surrogate
            excess = (correction - 1.0).abs() * mask
            metrics["correction"] = excess.sum() / inputs.num_loss_tokens
        loss = -(weights * surrogate).masked_fill(~mask, 0.0).sum()
        is_clipped = (clipped * advantages < ratio * advantages) & mask
        # k3 estimator of KL(old || new): never negative, low variance.
        moved = (difference.expm1() - difference).detach()
        metrics["clip_fraction"] = is_clipped.sum() / inputs.num_loss_tokens
        metrics["policy_kl"] = moved.sum() / inputs.num_loss_tokens
        if self.kl is not None:
            assert inputs.reference_logprobs_BT is not None
            penalty = self.kl.per_token(inputs.logprobs_BT, inputs.reference_logprobs_BT)
            penalty = penalty.masked_fill(~mask, 0.0)
            loss = loss + self.kl.weight * (weights * penalty).sum()
            metrics["reference_kl"] = penalty.detach().sum() / inputs.num_loss_tokens
        return LossOutputs(loss, metrics)


@dataclass(frozen=True)
class TokenClip(ClippedLoss):
    """The surrogate of GRPO, which TRACE takes over (arXiv 2607.13988): a ratio for each token.

    Implements

        r_it = exp(log pi_it - log pi_old_it)

    Deviation: the mean is over all tokens of the global batch by default.
    """

    def log_ratio(self, difference_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Return the difference itself."""
        return difference_BT


@dataclass(frozen=True)
class SequenceClip(ClippedLoss):
    """The surrogate of GSPO (arXiv 2507.18071) in its form for token advantages, GSPO-token.

        s_i  = exp(mean_t (log pi_it - log pi_old_it))
        r_it = stopgrad(s_i) * pi_it / stopgrad(pi_it)

    The value of every ratio is that of the whole rollout, the gradient that of the token. Clip
    ranges are far smaller than those of single tokens; the paper uses 3e-4 and 4e-4, and the mean
    over rollouts (:class:`~trace_pl.losses.TrajectoryMean`).
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def log_ratio(self, difference_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Return the mean difference of each row, with the gradient of each token's own."""
        num_tokens_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        mean_B1 = difference_BT.detach().sum(dim=1, keepdim=True) / num_tokens_B1
        return mean_B1 + difference_BT - difference_BT.detach()
