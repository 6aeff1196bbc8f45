"""Credit that is compared among the rollouts of one question; what anchors of other methods use.

Rollouts of a group have different numbers of turns, so everything here is a list with one tensor
for each. Differences that are no larger than rounding count as none: an optimizer that divides by
the size of its gradient would make a full step of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trace_pl.credit.anchoring import EQUAL_REWARDS, group_outcome_advantages


@torch.no_grad()
def readiness_advantages(
    values: Sequence[Tensor], credits: Sequence[Tensor], width: float = 0.2
) -> list[Tensor]:
    """Return by how much each action did better than the rest of its group from the same readiness.

    How much there is left to gain depends on what has been found, so the credit of an action is
    compared with what the *other* rollouts were credited where they were as ready:

        m(j) = the m with the smallest |V_{j,m} - V_{i,k}|, if that is at most ``width``
        b_{i,k} = mean of c_{j,m(j)} over j != i
        A_{i,k} = c_{i,k} - b_{i,k},   0 where no other rollout was ever as ready

    The last action, k = N, is the final answer, whose own credit is 0: answering is charged what
    others still gained from there. With the return-to-go of readiness as credit, b is a critic's
    baseline without a critic. Every rollout has one vote however long it dwells, and rollouts that
    did the same get exactly 0. This is the project's own and in no paper.

    Args:
        values: (N_i + 1,) value at each boundary of each rollout, in nats.
        credits: (N_i,) credit of each turn of each rollout, in nats.
        width: largest difference of equal readiness, in nats.

    Returns:
        (N_i + 1,) float32 advantages of each rollout: one for each turn, then the answer's.
    """
    lengths = [len(each) for each in values]
    owner = torch.arange(len(values)).repeat_interleave(torch.tensor(lengths))
    actions = [torch.cat([each, each.new_zeros(1)]).double() for each in credits]
    readiness, credit = torch.cat(list(values)).double(), torch.cat(actions)
    total, count = torch.zeros_like(credit), torch.zeros_like(credit)
    for j, (others, paid) in enumerate(zip(values, actions, strict=True)):
        distance = (readiness[:, None] - others.double()).abs()
        nearest = distance.min(dim=1).values
        is_nearest = (distance <= nearest[:, None]).double()
        votes = (nearest <= width) & (owner != j)
        total += torch.where(votes, (is_nearest @ paid) / is_nearest.sum(dim=1), 0.0)
        count += votes
    advantages = torch.where(count > 0, credit - total / count.clamp(min=1), 0.0)
    rounded = torch.where(advantages.abs() <= EQUAL_REWARDS, 0.0, advantages)
    return list(rounded.float().split(lengths))


@torch.no_grad()
def pooled_advantages(
    gains: Sequence[Tensor], rewards: Tensor, discount: float = 1.0
) -> list[Tensor]:
    """Return the discounted sum of all later rewards, standardised over all turns of the group.

    Implements the turn-level advantage of IGPO (arXiv 2510.14967): with r_{i,k} the gain of turn k
    and r_{i,N} the outcome of rollout i,

        z_{i,k} = (r_{i,k} - mean(r)) / std(r)      over all turns and outcomes of the group
        A_{i,k} = sum_{u >= k} gamma^(u-k) * z_{i,u}

    Args:
        gains: (N_i,) gain of each turn of each rollout.
        rewards: (G,) outcome of each rollout.
        discount: gamma, in 0 .. 1.

    Returns:
        (N_i + 1,) float32 advantages of each rollout: one for each turn, then the answer's.
    """
    actions = [torch.cat([each, reward[None]]) for each, reward in zip(gains, rewards, strict=True)]
    pooled = group_outcome_advantages(torch.cat(actions).double()).split(
        [len(each) for each in actions]
    )
    return [discounted_sums(each, discount).float() for each in pooled]


@torch.no_grad()
def turnwise_advantages(gains: Sequence[Tensor]) -> list[Tensor]:
    """Return gains standardised among the turns of the group that have the same number.

    The first turns are compared with first turns, the last of a long rollout with nothing: turn k
    of a rollout that alone has so many gets 0. Turn-wise GRPO of DeltaBelief-RL (arXiv 2602.12342)
    and the turn-group normalisation of A2TGPO (arXiv 2605.06200).

    Args:
        gains: (N_i,) gain of each turn of each rollout.

    Returns:
        (N_i,) float32 advantages of each rollout, without unit.
    """
    results = [torch.zeros(len(each)) for each in gains]
    for number in range(max(map(len, gains), default=0)):
        members = [i for i, each in enumerate(gains) if len(each) > number]
        level = group_outcome_advantages(torch.stack([gains[i][number] for i in members]))
        for i, advantage in zip(members, level, strict=True):
            results[i][number] = advantage
    return results


def discounted_sums(rewards: Tensor, discount: float) -> Tensor:
    """Return for each place the discounted sum of the numbers from there on.

    Args:
        rewards: (N,) numbers.
        discount: gamma, in 0 .. 1.
    """
    ahead = torch.arange(len(rewards), device=rewards.device)
    steps = ahead - ahead[:, None]
    weights = torch.where(steps >= 0, discount ** steps.clamp(min=0).to(rewards.dtype), 0.0)
    return weights @ rewards
