"""How turn credit and outcome become token advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from trace_pl.credit.anchoring import anchored_turn_rewards, token_advantages
from trace_pl.credit.gigpo import (
    EqualStates,
    StateMatch,
    gigpo_step_advantages,
    observed_states,
)
from trace_pl.credit.outcomes import OutcomeBaseline, StandardisedOutcome
from trace_pl.credit.stages import Anchor
from trace_pl.credit.td import check_backup_settings
from trace_pl.errors import ConfigError
from trace_pl.types import Boundaries, ProbeValues, RolloutGroup, TokenAdvantages, TurnCredit


class TraceAnchor(Anchor):
    """The outcome anchor of TRACE: outcome for every token, turn reward for its own action.

    Deviation: the paper always trains on groups whose rewards are all equal, where turn credit is
    all there is; ``train_equal_groups`` can leave them out.

    Args:
        outcome_weight: alpha_out, weight of the outcome advantage on every sampled token.
        turn_weight: alpha_turn, weight of the anchored turn reward.
        terminal_scale: lambda, weight of the outcome within the turn reward of the last K turns; K
            and gamma are those of the backup.
        outcome: how rewards of a group are compared; standardised (GRPO) when None.
        train_equal_groups: whether groups that are all right or all wrong keep their turn credit.

    Raises:
        ConfigError: if a number is out of range.
    """

    def __init__(
        self,
        outcome_weight: float = 1.0,
        turn_weight: float = 0.2,
        terminal_scale: float = 2.0,
        outcome: OutcomeBaseline | None = None,
        train_equal_groups: bool = True,
    ) -> None:
        require_weight("outcome_weight", outcome_weight)
        require_weight("turn_weight", turn_weight)
        require_weight("terminal_scale", terminal_scale)
        self.outcome_weight = outcome_weight
        self.turn_weight = turn_weight
        self.terminal_scale = terminal_scale
        self.outcome: OutcomeBaseline = outcome or StandardisedOutcome()
        self.train_equal_groups = train_equal_groups

    def anchor(
        self,
        group: RolloutGroup,
        boundaries: Sequence[Boundaries],
        values: Sequence[ProbeValues],
        credits: Sequence[TurnCredit],
    ) -> list[TokenAdvantages]:
        """Return the token advantages of one group; see ``Anchor.anchor``."""
        outcomes = self.outcome(group.rewards)
        is_trained = self.train_equal_groups or bool(outcomes.any())
        turn_rewards = [
            anchored_turn_rewards(
                credit.credit, outcome, credit.num_steps, credit.discount, self.terminal_scale
            )
            for credit, outcome in zip(credits, outcomes.tolist(), strict=True)
        ]
        turn_weight = self.turn_weight if is_trained else 0.0
        return spread(group, boundaries, turn_rewards, outcomes, self.outcome_weight, turn_weight)


class OutcomeOnly(Anchor):
    """Every sampled token gets its rollout's outcome advantage: GRPO, Dr. GRPO or RLOO.

    Args:
        outcome_weight: alpha_out, weight of the outcome advantage.
        outcome: how rewards of a group are compared; standardised (GRPO) when None.

    Raises:
        ConfigError: if the weight is negative or not finite.
    """

    needs_turn_credit: ClassVar[bool] = False

    def __init__(self, outcome_weight: float = 1.0, outcome: OutcomeBaseline | None = None) -> None:
        require_weight("outcome_weight", outcome_weight)
        self.outcome_weight = outcome_weight
        self.outcome: OutcomeBaseline = outcome or StandardisedOutcome()

    def anchor(
        self,
        group: RolloutGroup,
        boundaries: Sequence[Boundaries],
        values: Sequence[ProbeValues],
        credits: Sequence[TurnCredit],
    ) -> list[TokenAdvantages]:
        """Return the token advantages of one group; see ``Anchor.anchor``."""
        no_rewards = [torch.zeros(ends.num_turns) for ends in boundaries]
        outcomes = self.outcome(group.rewards)
        return spread(group, boundaries, no_rewards, outcomes, self.outcome_weight, 0.0)


class GiGPOAnchor(Anchor):
    """The group in group of GiGPO: outcome advantage plus that among turns from the same state.

    Deviation: the final answer is no turn here and gets the outcome advantage alone.

    Args:
        outcome_weight: Weight of the outcome advantage on every sampled token.
        step_weight: omega, weight of the step advantage on the tokens of its turn.
        discount: gamma of the outcome from one turn to the one before, in 0 .. 1.
        match: which states count as the same; equal ones when None.
        outcome: how rewards, and the outcomes of a state, are compared; standardised when None.
            ``CentredOutcome`` is the form that divides by 1.

    Raises:
        ConfigError: if a number is out of range.
    """

    needs_turn_credit: ClassVar[bool] = False

    def __init__(
        self,
        outcome_weight: float = 1.0,
        step_weight: float = 1.0,
        discount: float = 0.95,
        match: StateMatch | None = None,
        outcome: OutcomeBaseline | None = None,
    ) -> None:
        require_weight("outcome_weight", outcome_weight)
        require_weight("step_weight", step_weight)
        check_backup_settings(1, discount)
        self.outcome_weight = outcome_weight
        self.step_weight = step_weight
        self.discount = discount
        self.match: StateMatch = match or EqualStates()
        self.outcome: OutcomeBaseline = outcome or StandardisedOutcome()

    def anchor(
        self,
        group: RolloutGroup,
        boundaries: Sequence[Boundaries],
        values: Sequence[ProbeValues],
        credits: Sequence[TurnCredit],
    ) -> list[TokenAdvantages]:
        """Return the token advantages of one group; see ``Anchor.anchor``."""
        states = [
            observed_states(rollout, ends)
            for rollout, ends in zip(group.rollouts, boundaries, strict=True)
        ]
        rewards = group.rewards
        steps = gigpo_step_advantages(states, rewards, self.discount, self.match, self.outcome)
        outcomes = self.outcome(rewards)
        return spread(group, boundaries, steps, outcomes, self.outcome_weight, self.step_weight)


def spread(
    group: RolloutGroup,
    boundaries: Sequence[Boundaries],
    turn_rewards: Sequence[Tensor],
    outcomes: Tensor,
    outcome_weight: float,
    turn_weight: float,
    answer_rewards: Sequence[float] | None = None,
) -> list[TokenAdvantages]:
    """Put both parts of each rollout's advantage on its tokens.

    Args:
        group: the G rollouts of one question.
        boundaries: one for each rollout.
        turn_rewards: (N,) reward of each turn, for each rollout.
        outcomes: (G,) outcome advantages.
        outcome_weight: alpha_out.
        turn_weight: alpha_turn.
        answer_rewards: reward of each final answer as an action; none when None.
    """
    last = [0.0] * len(boundaries) if answer_rewards is None else answer_rewards
    results = []
    for rollout, ends, rewards, outcome, answer in zip(
        group.rollouts, boundaries, turn_rewards, outcomes.tolist(), last, strict=True
    ):
        advantages = token_advantages(
            rollout.loss_mask, ends.prefix_ends, rewards, outcome, outcome_weight, turn_weight,
            answer,
        )  # fmt: skip
        results.append(TokenAdvantages(rollout.id, advantages, outcome, rewards))
    return results


def require_weight(name: str, weight: float) -> None:
    """Raise ConfigError unless a setting of an anchor is a finite number of at least 0."""
    if not (math.isfinite(weight) and weight >= 0.0):
        raise ConfigError(
            f"Expected {name} to be a finite number of at least 0, got {weight}. "
            f"Change `credit.anchor.init_args.{name}`."
        )
