"""What a token weighs in the global batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_pl.losses.inputs import LossInputs


class Normaliser(ABC):
    """Decides what each sampled token weighs in the loss of the global batch.

    Rollouts differ in length, so "the mean" is a choice: over tokens, where long rollouts count
    more; over rollouts, where each token of a long one counts less; or by a constant length, where
    the weight of a token depends on no other rollout. The choice decides whether the policy is
    drawn to longer or shorter answers.
    """

    @abstractmethod
    def weights(self, inputs: LossInputs) -> Tensor:
        """Return the (B, 1) weight of each sampled token of a row.

        It is that of the global batch, so that micro-batches and ranks add up.
        """


@dataclass(frozen=True, slots=True)
class TokenMean(Normaliser):
    """Every sampled token weighs the same, so a long rollout weighs more than a short one.

    w_it = 1 / M        M the sampled tokens of the global batch
    """

    def weights(self, inputs: LossInputs) -> Tensor:
        """Return 1 / M for each row."""
        return torch.full_like(inputs.advantages_BT[:, :1], 1.0 / inputs.num_loss_tokens)


@dataclass(frozen=True, slots=True)
class TrajectoryMean(Normaliser):
    """Every rollout weighs the same, whatever its length: the mean of GRPO's and GSPO's papers.

    w_it = 1 / (R n_i)      R rollouts in the global batch, n_i sampled tokens of rollout i
    """

    def weights(self, inputs: LossInputs) -> Tensor:
        """Return 1 / (R n_i) for each row; a row without sampled tokens has nothing to weigh."""
        num_tokens_B1 = inputs.mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        return 1.0 / (inputs.num_rollouts * num_tokens_B1.to(inputs.advantages_BT.dtype))


@dataclass(frozen=True, slots=True)
class ConstantLength(Normaliser):
    """Every token weighs the same whatever the lengths of the batch: the divisor of Dr. GRPO.

    Implements the objective of Dr. GRPO (arXiv 2503.20783), where dividing by the length of a
    response would favour long wrong ones, and by the tokens of the batch short batches:

        w_it = 1 / (R L)    R rollouts in the global batch, L the most tokens that one may have

    Deviation: L bounds one response there; here ``data.limits.max_trajectory_tokens``, which bounds
    what is sampled in all turns together.
    """

    def weights(self, inputs: LossInputs) -> Tensor:
        """Return 1 / (R L) for each row."""
        divisor = inputs.num_rollouts * inputs.token_limit
        return torch.full_like(inputs.advantages_BT[:, :1], 1.0 / divisor)
