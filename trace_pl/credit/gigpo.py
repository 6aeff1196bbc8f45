"""Step advantages of GiGPO: rollouts of a group compared where they passed the same state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import torch
from torch import Tensor

from trace_pl.credit.anchoring import checked_rewards, group_outcome_advantages
from trace_pl.errors import ConfigError
from trace_pl.types import Boundaries, Rollout, TokenKind

NUM_HASHES = 512
"""Hashes of tokens that are counted before states are compared in full."""


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


class StateMatch(ABC):
    """Decides which states of a group count as one.

    GiGPO compares turns that start from the same state, its anchor state: what one rollout did
    better from there than another is then the merit of the action alone. The stricter the match,
    the fairer the comparison and the fewer turns that have anything to be compared with.
    """

    @abstractmethod
    def clusters(self, states: Sequence[Sequence[Hashable]]) -> list[list[int]]:
        """Return the positions of ``states`` in parts, each of states that count as one."""


@dataclass(frozen=True, slots=True)
class EqualStates(StateMatch):
    """States count as one if the policy saw the very same tokens."""

    def clusters(self, states: Sequence[Sequence[Hashable]]) -> list[list[int]]:
        """Return the positions of equal states together."""
        found: dict[Sequence[Hashable], list[int]] = {}
        for position, state in enumerate(states):
            found.setdefault(state, []).append(position)
        return list(found.values())


@dataclass(frozen=True, slots=True)
class SimilarStates(StateMatch):
    """States count as one if they are as similar as ``difflib`` finds, as in GiGPO's search agent.

    A state joins the first part whose first state it resembles, in the order of rollouts and turns:

        ratio = 2 M / (a + b)       a and b the lengths, M the tokens in matching blocks

    Deviation: tokens are compared; the authors compare characters, which takes far longer.

    Args:
        threshold: Least ratio, above 0 and at most 1.

    Raises:
        ConfigError: if it is out of range.
    """

    threshold: float = 0.9

    def __post_init__(self) -> None:
        if not 0.0 < self.threshold <= 1.0:
            raise ConfigError(
                f"Expected a threshold above 0 and at most 1, got {self.threshold}. Change "
                "`credit.anchor.init_args.match.init_args.threshold`; GiGPO's search agent has 0.9."
            )

    def clusters(self, states: Sequence[Sequence[Hashable]]) -> list[list[int]]:
        """Return the positions of similar states together."""
        found: list[list[int]] = []
        counts_SH = _hash_counts(states)
        for position, state in enumerate(states):
            # It prepares the second sequence, and that is compared to many.
            matcher: SequenceMatcher[Hashable] = SequenceMatcher(None, (), state, autojunk=False)
            firsts_F = [part[0] for part in found]
            bound_F = _ratio_bound(counts_SH[firsts_F], counts_SH[position])
            # Two empty states have no bound and are equal.
            for number in (~(bound_F < self.threshold)).nonzero().flatten().tolist():
                if self._is_similar(matcher, states[firsts_F[number]], state):
                    found[number].append(position)
                    break
            else:
                found.append([position])
        return found

    def _is_similar(
        self,
        matcher: SequenceMatcher[Hashable],
        first: Sequence[Hashable],
        state: Sequence[Hashable],
    ) -> bool:
        if first == state:
            return True
        matcher.set_seq1(first)
        # The first is an upper bound of the second, and much cheaper.
        return matcher.quick_ratio() >= self.threshold and matcher.ratio() >= self.threshold


def _hash_counts(states: Sequence[Sequence[Hashable]]) -> Tensor:
    """Return for each of S states how many of its tokens fall on each of H hashes, (S, H) int32."""
    counts_SH = torch.zeros(len(states), NUM_HASHES, dtype=torch.int32)
    for counts_H, state in zip(counts_SH, states, strict=True):
        hashes = torch.tensor([hash(token) % NUM_HASHES for token in state], dtype=torch.long)
        counts_H += torch.bincount(hashes, minlength=NUM_HASHES)
    return counts_SH


def _ratio_bound(firsts_FH: Tensor, state_H: Tensor) -> Tensor:
    """Return (F,) float64, at least the ratio of a state with each of F others.

    Tokens in matching blocks have equal hashes, so there are no more of them than hashes shared.
    """
    shared_F = torch.minimum(firsts_FH, state_H).sum(dim=1)
    return 2.0 * shared_F.double() / (firsts_FH.sum(dim=1) + state_H.sum())


@torch.no_grad()
def gigpo_step_advantages(
    states: Sequence[Sequence[Sequence[Hashable]]],
    rewards: Tensor,
    discount: float = 0.95,
    match: StateMatch | None = None,
    compare: Callable[[Tensor], Tensor] = group_outcome_advantages,
) -> list[Tensor]:
    """Return how much better each turn's discounted outcome is than that of its anchor state.

    Implements the step-level advantage of GiGPO (arXiv 2505.10978), whose only reward here is the
    outcome, given to the answer that follows the last turn:

        Q_ik = gamma^(N_i - k) * R_i
        A_ik = (Q_ik - mean) / F        over all turns of the group that start in the state of ik

    and 0 where the state was met once or all its Q are equal. F is the standard deviation, or 1:
    ``compare`` says which.

    Deviation: the authors' code divides by the deviation of a sample; here it is that of the group.

    Args:
        states: for each of G rollouts its N states, each a sequence of what was seen.
        rewards: (G,) outcome rewards.
        discount: gamma, in 0 .. 1.
        match: which states count as one; equal ones when None.
        compare: from the (M,) Q of one state to M advantages.

    Returns:
        For each rollout (N,) step advantages, in the dtype of the rewards.

    Raises:
        CreditError: if a reward is not finite.
    """
    checked_rewards(rewards)
    advantages = [rewards.new_zeros(len(visited)) for visited in states]
    places = [(i, k) for i, visited in enumerate(states) for k in range(len(visited))]
    parts = (match or EqualStates()).clusters([states[i][k] for i, k in places])
    for part in parts:
        met = [places[position] for position in part]
        outcomes = [rewards[i] * discount ** (len(states[i]) - k) for i, k in met]
        for (i, k), advantage in zip(met, compare(torch.stack(outcomes)), strict=True):
            advantages[i][k] = advantage
    return advantages
