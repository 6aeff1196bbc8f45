"""What a token weighs in the global batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_pl.losses.inputs import LossInputs


class Normaliser(ABC):
    """Gives the weights of a mean over the global batch."""

    @abstractmethod
    def weights(self, inputs: LossInputs) -> Tensor:
        """Return (B, 1) weights; over the sampled tokens of the global batch they add up to 1."""


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
