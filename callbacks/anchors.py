"""How turn credit and outcome become token advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch

from trace_pl.credit.anchoring import (
    anchored_turn_rewards,
    group_outcome_advantages,
    token_advantages,
)
from trace_pl.credit.stages import Anchor
from trace_pl.errors import ConfigError
from trace_pl.types import Boundaries, RolloutGroup, TokenAdvantages, TurnCredit


class TraceAnchor(Anchor):
    """The outcome anchor of TRACE: outcome for every token, turn reward for its own action.

    Args:
        outcome_weight: alpha_out, weight of the outcome advantage on every sampled token.
        turn_weight: alpha_turn, weight of the anchored turn reward.
        terminal_scale: lambda, weight of the outcome within the turn reward of the last K turns; K
            and gamma are those of the backup.

    Raises:
        ConfigError: if a number is out of range.
    """

    def __init__(
        self,
        outcome_weight: float = 1.0,
        turn_weight: float = 0.2,
        terminal_scale: float = 2.0,
    ) -> None:
        _require_weight("outcome_weight", outcome_weight)
        _require_weight("turn_weight", turn_weight)
        _require_weight("terminal_scale", terminal_scale)
        self.outcome_weight = outcome_weight
        self.turn_weight = turn_weight
        self.terminal_scale = terminal_scale

    def anchor(
        self,
        group: RolloutGroup,
        boundaries: Sequence[Boundaries],
        credits: Sequence[TurnCredit],
    ) -> list[TokenAdvantages]:
        """Return the token advantages of one group; see ``Anchor.anchor``."""
        outcomes = group_outcome_advantages(group.rewards).tolist()
        results = []
        for rollout, ends, credit, outcome in zip(
            group.rollouts, boundaries, credits, outcomes, strict=True
        ):
            rewards = anchored_turn_rewards(
                credit.credit, outcome, credit.num_steps, credit.discount, self.terminal_scale
            )
            advantages = token_advantages(
                rollout.loss_mask,
                ends.prefix_ends,
                rewards,
                outcome,
                self.outcome_weight,
                self.turn_weight,
            )
            results.append(TokenAdvantages(rollout.id, advantages, outcome, rewards))
        return results


class OutcomeOnly(Anchor):
    """The advantages of GRPO: every sampled token gets its rollout's outcome advantage.

    Args:
        outcome_weight: alpha_out, weight of the outcome advantage.

    Raises:
        ConfigError: if the weight is negative or not finite.
    """

    needs_turn_credit: ClassVar[bool] = False

    def __init__(self, outcome_weight: float = 1.0) -> None:
        _require_weight("outcome_weight", outcome_weight)
        self.outcome_weight = outcome_weight

    def anchor(
        self,
        group: RolloutGroup,
        boundaries: Sequence[Boundaries],
        credits: Sequence[TurnCredit],
    ) -> list[TokenAdvantages]:
        """Return the token advantages of one group; see ``Anchor.anchor``."""
        outcomes = group_outcome_advantages(group.rewards).tolist()
        results = []
        for rollout, ends, outcome in zip(group.rollouts, boundaries, outcomes, strict=True):
            no_rewards = torch.zeros(ends.num_turns)
            advantages = token_advantages(
                rollout.loss_mask,
                ends.prefix_ends,
                no_rewards,
                outcome,
                self.outcome_weight,
                turn_weight=0.0,
            )
            results.append(TokenAdvantages(rollout.id, advantages, outcome, no_rewards))
        return results


def _require_weight(name: str, weight: float) -> None:
    if not (math.isfinite(weight) and weight >= 0.0):
        raise ConfigError(
            f"Expected {name} to be a finite number of at least 0, got {weight}. "
            f"Change `credit.anchor.init_args.{name}`."
        )
