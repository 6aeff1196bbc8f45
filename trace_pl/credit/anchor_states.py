"""Step advantages of GiGPO: rollouts of a group compared where they passed the same state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from trace_pl.credit.anchoring import checked_rewards, group_outcome_advantages
from trace_pl.types import Boundaries, Rollout, TokenKind


def observed_states(rollout: Rollout, boundaries: Boundaries) -> list[tuple[int, ...]]:
    """Return what the policy last saw before each of its N turns, as token ids.

    The first state is the prompt; the state before turn k + 1 is everything between boundaries
    k - 1 and k that the policy did not write itself.
    """
    states = []
    start = 0
    for stop in boundaries.prefix_ends[:-1]:
        seen = rollout.kinds[start:stop] != TokenKind.ACTION
        states.append(tuple(rollout.token_ids[start:stop][seen].tolist()))
        start = stop
    return states


@torch.no_grad()
def anchor_state_advantages(
    states: Sequence[Sequence[Hashable]], rewards: Tensor, discount: float = 0.95
) -> list[Tensor]:
    """Return how much better each turn's discounted outcome is than that of its anchor state.

    Implements the step-level advantage of GiGPO (arXiv 2505.10978), whose only reward here is the
    outcome, given to the answer that follows the last turn:

        Q_ik = gamma^(N_i - k) * R_i
        A_ik = (Q_ik - mean) / std      over all turns of the group that start in the state of ik

    and 0 where the state was met once or all its Q are equal.

    Args:
        states: for each of G rollouts its N states, equal where the policy saw the same.
        rewards: (G,) outcome rewards.
        discount: gamma, in 0 .. 1.

    Returns:
        For each rollout (N,) step advantages, in the dtype of the rewards.

    Raises:
        CreditError: if a reward is not finite.
    """
    checked_rewards(rewards)
    met: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    advantages = []
    for i, visited in enumerate(states):
        advantages.append(rewards.new_zeros(len(visited)))
        for k, state in enumerate(visited):
            met[state].append((i, k))
    for places in met.values():
        outcomes = [rewards[i] * discount ** (len(states[i]) - k) for i, k in places]
        for (i, k), advantage in zip(
            places, group_outcome_advantages(torch.stack(outcomes)), strict=True
        ):
            advantages[i][k] = advantage
    return advantages
