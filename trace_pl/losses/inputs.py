"""What a loss is given and what it gives back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class LossInputs:
    """One micro-batch as a loss sees it; all (B, T) float32 but the mask."""

    logprobs_BT: Tensor
    """Log-probs of the policy being trained, with gradient."""
    old_logprobs_BT: Tensor
    """Log-probs of the policy at the start of the epoch, by the trainer; constant."""
    sampler_logprobs_BT: Tensor
    """Log-probs of the same policy as the engine gave them when sampling; constant."""
    advantages_BT: Tensor
    mask_BT: Tensor
    """Bool, true on sampled tokens."""
    num_loss_tokens: float
    """Sampled tokens of the whole global batch (all micro-batches, all ranks), at least 1."""
    num_rollouts: float
    """Rollouts of the whole global batch with a sampled token, at least 1."""
    reference_logprobs_BT: Tensor | None = None
    """Log-probs of the frozen reference; given to a loss that ``needs_reference``."""
    is_on_policy: bool = False
    """Whether the policy being trained is, but for rounding, the one that sampled."""
    token_limit: float = 1.0
    """Most tokens that a rollout of this run may have."""


@dataclass(frozen=True, eq=False)
class LossOutputs:
    """The loss and what to log about it: shares of the global batch that micro-batches add up.

    Metrics have the same names in every micro-batch, so that ranks can exchange them.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


class PolicyLoss(ABC):
    """A policy-gradient objective, normalised by the whole global batch.

    Credit is settled before a loss is asked: it gets the advantage of every sampled token and makes
    tokens with a positive one likelier, others less likely. Losses differ in how far they let the
    policy move on one batch (the ratio and its clipping), in what a token weighs, and in how they
    treat tokens that another policy sampled. Each micro-batch gives its share of one global batch,
    so the sum over micro-batches and ranks has the gradient of one big batch.
    """

    @property
    def needs_reference(self) -> bool:
        """Whether ``reference_logprobs_BT`` has to be given."""
        return False

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Return the loss of this micro-batch."""
