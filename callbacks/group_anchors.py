"""Anchors that compare turns among the rollouts of a question: other methods, in the same slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from callbacks.anchors import OutcomeOnly, require_weight, spread
from trace_pl.credit.groups import (
    discounted_sums,
    pooled_advantages,
    readiness_advantages,
    turnwise_advantages,
)
from trace_pl.credit.outcomes import OutcomeBaseline, StandardisedOutcome
from trace_pl.credit.stages import Anchor
from trace_pl.credit.td import check_backup_settings
from trace_pl.types import Boundaries, ProbeValues, RolloutGroup, TokenAdvantages, TurnCredit


class ReadinessBaseline(Anchor):
    """Compares the credit of an action with that of others from the same readiness.

    See :func:`trace_pl.credit.groups.readiness_advantages`; meant for the credit of
    :class:`callbacks.ReturnToGo`. The final answer is an action like the others, so answering too
    early costs what other rollouts gained from there; a turn that found nothing new earns nothing,
    and where a group agrees nothing is trained. It is this project's own and in no paper.

    Args:
        outcome_weight: alpha_out, weight of the outcome advantage on every sampled token.
        turn_weight: alpha_turn, weight of the compared credit on the tokens of its action.
        width: largest difference of values that count as the same readiness, in nats.
        outcome: how rewards of a group are compared; standardised (GRPO) when None.

    Raises:
        ConfigError: if a number is out of range.
    """

    def __init__(
        self,
        outcome_weight: float = 1.0,
        turn_weight: float = 0.5,
        width: float = 0.2,
        outcome: OutcomeBaseline | None = None,
    ) -> None:
        require_weight("outcome_weight", outcome_weight)
        require_weight("turn_weight", turn_weight)
        require_weight("width", width)
        self.outcome_weight = outcome_weight
        self.turn_weight = turn_weight
        self.width = width
        self.outcome: OutcomeBaseline = outcome or StandardisedOutcome()

    def anchor(
        self,
        group: RolloutGroup,
        boundaries: Sequence[Boundaries],
        values: Sequence[ProbeValues],
        credits: Sequence[TurnCredit],
    ) -> list[TokenAdvantages]:
        """Return the token advantages of one group; see ``Anchor.anchor``."""
        actions = readiness_advantages(
            [each.values for each in values], [each.credit for each in credits], self.width
        )
        return spread(
            group,
            boundaries,
            [each[:-1] for each in actions],
            self.outcome(group.rewards),
            self.outcome_weight,
            self.turn_weight,
            [float(each[-1]) for each in actions],
        )


class IGPOAnchor(Anchor):
    """Pools the gains of all turns with the outcomes, standardises, and sums what follows.

    IGPO (arXiv 2510.14967), see :func:`trace_pl.credit.groups.pooled_advantages`. Its gains are
    those of :class:`trace_pl.credit.ProbabilityValue` over one step, asked of the policy, and its
    outcome is token F1 (``trace_pl.tasks.TokenF1Reward``).

    Deviation: the authors' released code standardises whole returns; this is the paper's form.

    Args:
        discount: gamma of later rewards, in 0 .. 1.

    Raises:
        ConfigError: if the discount is out of range.
    """

    def __init__(self, discount: float = 1.0) -> None:
        check_backup_settings(1, discount)
        self.discount = discount

    def anchor(
        self,
        group: RolloutGroup,
        boundaries: Sequence[Boundaries],
        values: Sequence[ProbeValues],
        credits: Sequence[TurnCredit],
    ) -> list[TokenAdvantages]:
        """Return the token advantages of one group; see ``Anchor.anchor``."""
        actions = pooled_advantages([each.credit for each in credits], group.rewards, self.discount)
        return spread(
            group,
            boundaries,
            [each[:-1] for each in actions],
            torch.zeros(len(actions)),
            outcome_weight=0.0,
            turn_weight=1.0,
            answer_rewards=[float(each[-1]) for each in actions],
        )


class TurnwiseAnchor(Anchor):
    """Standardises the credit of a turn among the turns of its group that have the same number.

    The turn-wise GRPO of DeltaBelief-RL (arXiv 2602.12342), on top of the outcome advantage; see
    :func:`trace_pl.credit.groups.turnwise_advantages`.

    Deviation: there the outcome is a reward of the last turn and standardised with its number; here
    it is GRPO's and reaches every token, as in the other methods.

    Args:
        outcome_weight: alpha_out, weight of the outcome advantage on every sampled token.
        turn_weight: alpha_turn, weight of the standardised credit on the tokens of its turn.
        outcome: how rewards of a group are compared; standardised (GRPO) when None.

    Raises:
        ConfigError: if a weight is negative or not finite.
    """

    def __init__(
        self,
        outcome_weight: float = 1.0,
        turn_weight: float = 1.0,
        outcome: OutcomeBaseline | None = None,
    ) -> None:
        require_weight("outcome_weight", outcome_weight)
        require_weight("turn_weight", turn_weight)
        self.outcome_weight = outcome_weight
        self.turn_weight = turn_weight
        self.outcome: OutcomeBaseline = outcome or StandardisedOutcome()

    def anchor(
        self,
        group: RolloutGroup,
        boundaries: Sequence[Boundaries],
        values: Sequence[ProbeValues],
        credits: Sequence[TurnCredit],
    ) -> list[TokenAdvantages]:
        """Return the token advantages of one group; see ``Anchor.anchor``."""
        turns = [self.accumulate(each) for each in turnwise_advantages([c.credit for c in credits])]
        outcomes = self.outcome(group.rewards)
        return spread(group, boundaries, turns, outcomes, self.outcome_weight, self.turn_weight)

    def accumulate(self, advantages: Tensor) -> Tensor:
        """Return what a turn gets of its own (N,) advantages and later ones: its own."""
        return advantages


class A2TGPOAnchor(TurnwiseAnchor):
    """Sums the turn-wise advantages of the turns that follow, at the scale of a single one.

    A2TGPO (arXiv 2605.06200): with z_k the gain of turn k standardised among turns of its number,

        A_k = sum_{u >= k} gamma^(u-k) * z_u / sqrt(number of terms)

    Deviation: the clip range of a turn does not depend on its gain here; a loss sees tokens, and
    their ratio is clipped as ``model.loss`` says.

    Args:
        outcome_weight: alpha_out, weight of the outcome advantage on every sampled token.
        turn_weight: alpha_turn, weight of the accumulated credit on the tokens of its turn.
        discount: gamma of later turns, in 0 .. 1.
        outcome: how rewards of a group are compared; standardised (GRPO) when None.

    Raises:
        ConfigError: if a number is out of range.
    """

    def __init__(
        self,
        outcome_weight: float = 1.0,
        turn_weight: float = 1.0,
        discount: float = 1.0,
        outcome: OutcomeBaseline | None = None,
    ) -> None:
        super().__init__(outcome_weight, turn_weight, outcome)
        check_backup_settings(1, discount)
        self.discount = discount

    def accumulate(self, advantages: Tensor) -> Tensor:
        """Return the rescaled discounted sums of (N,) advantages."""
        num_terms = torch.arange(len(advantages), 0, -1)
        return discounted_sums(advantages, self.discount) / num_terms.sqrt()


class AnswerLikelihood(OutcomeOnly):
    """Takes the last value of a rollout for its outcome: how likely the gold answer has become.

    The reward of RLPR (arXiv 2506.18254) with :class:`trace_pl.credit.ProbabilityValue`, which is
    the gain over the prompt alone. No answer is graded, so it trains where no rule can grade one.

    Deviation: RLPR measures the answer after the policy's own reasoning within the response and
    filters prompts by the spread of their rewards; here it is measured after the last observation,
    and a group of equal rewards trains nothing, as with any other.

    Args:
        outcome_weight: alpha_out, weight of the advantage on every sampled token.
        outcome: how the likelihoods of a group are compared; standardised (GRPO) when None.

    Raises:
        ConfigError: if the weight is negative or not finite.
    """

    needs_turn_credit: ClassVar[bool] = True  # its values, that is

    def anchor(
        self,
        group: RolloutGroup,
        boundaries: Sequence[Boundaries],
        values: Sequence[ProbeValues],
        credits: Sequence[TurnCredit],
    ) -> list[TokenAdvantages]:
        """Return the token advantages of one group; see ``Anchor.anchor``."""
        likelihoods = torch.stack([each.values[-1] for each in values]).clamp(min=0.0)
        none = [torch.zeros(ends.num_turns) for ends in boundaries]
        return spread(group, boundaries, none, self.outcome(likelihoods), self.outcome_weight, 0.0)
