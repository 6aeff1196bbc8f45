"""How the outcome rewards of a group become outcome advantages: small classes for one setting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_pl.credit.anchoring import EQUAL_REWARDS, checked_rewards, group_outcome_advantages


class OutcomeBaseline(ABC):
    """Compares each rollout of a question with the others of its group.

    A reward by itself says little: 1 on an easy question is no merit. The rollouts of one question
    share its difficulty, so each is compared with the others, which takes the place of a learned
    critic. The baselines differ in what they subtract (the mean of all, or of all others) and in
    whether they divide by the spread.
    """

    @abstractmethod
    def __call__(self, rewards: Tensor) -> Tensor:
        """Return (G,) outcome advantages of (G,) rewards, all 0 when the rewards are equal."""


@torch.no_grad()
def centred_rewards(rewards: Tensor) -> Tensor:
    """Return how much better each reward is than its group's mean, in units of reward.

    Implements the advantage of Dr. GRPO (arXiv 2503.20783): dividing by the standard deviation
    would weigh questions that are nearly always or nearly never solved above all others.

        A_i = R_i - mean(R)

    Args:
        rewards: (G,) outcome reward of each rollout of one question.

    Returns:
        (G,) outcome advantages in the dtype of the input; exactly 0 when all rewards are equal.

    Raises:
        CreditError: if a reward is not finite.
    """
    rewards = checked_rewards(rewards)
    if len(rewards) == 0 or rewards.max() - rewards.min() <= EQUAL_REWARDS:
        return torch.zeros_like(rewards)
    return rewards - rewards.mean()


@torch.no_grad()
def leave_one_out_advantages(rewards: Tensor) -> Tensor:
    """Return how much better each reward is than the mean of the others, in units of reward.

    Implements the advantage of RLOO (arXiv 2402.14740), whose baseline does not depend on the
    rollout it is subtracted from and so leaves the gradient unbiased:

        A_i = R_i - mean(R without R_i) = G / (G - 1) * (R_i - mean(R))

    Args:
        rewards: (G,) outcome reward of each rollout of one question.

    Returns:
        (G,) outcome advantages in the dtype of the input; exactly 0 when G is 1 or all are equal.

    Raises:
        CreditError: if a reward is not finite.
    """
    size = len(rewards)
    centred = centred_rewards(rewards)
    return centred * size / (size - 1) if size > 1 else centred


@dataclass(frozen=True, slots=True)
class StandardisedOutcome(OutcomeBaseline):
    """:func:`trace_pl.credit.group_outcome_advantages` as a setting (GRPO, TRACE)."""

    def __call__(self, rewards: Tensor) -> Tensor:
        """Return ``group_outcome_advantages`` of ``rewards``."""
        return group_outcome_advantages(rewards)


@dataclass(frozen=True, slots=True)
class CentredOutcome(OutcomeBaseline):
    """:func:`centred_rewards` as a setting (Dr. GRPO)."""

    def __call__(self, rewards: Tensor) -> Tensor:
        """Return :func:`centred_rewards` of ``rewards``."""
        return centred_rewards(rewards)


@dataclass(frozen=True, slots=True)
class LeaveOneOutOutcome(OutcomeBaseline):
    """:func:`leave_one_out_advantages` as a setting (RLOO)."""

    def __call__(self, rewards: Tensor) -> Tensor:
        """Return :func:`leave_one_out_advantages` of ``rewards``."""
        return leave_one_out_advantages(rewards)
