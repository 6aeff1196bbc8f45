"""Where credit is assigned: the four stages, in their order.

What happens in an epoch:

1. The engine gets the policy's weights, and G rollouts are sampled for each question.
2. A reward grades the answer of each rollout: one number at the end.
3. The segmenter cuts each rollout into N turns by N + 1 boundaries.
4. The prober measures at each boundary how likely the gold answer is, and makes it a value.
5. The backup turns differences of values into the credit of each turn.
6. The anchor compares rewards within the group, and spreads outcome and credit over tokens.
7. The loss weighs each sampled token by its advantage, and the optimizer takes its steps.

Steps 3 to 6 are here, and what each stage hands on is checked; 1 and 2 are rollouts, 7 is training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import torch
from lightning.pytorch.callbacks import Callback

from trace_pl.credit.checks import (
    check_advantages,
    check_boundaries,
    check_credit,
    check_results,
    check_values,
)
from trace_pl.credit.stages import Anchor, Backup, Prober, Reader, Segmenter
from trace_pl.errors import ConfigError
from trace_pl.probes import Scorer, Template
from trace_pl.types import (
    Boundaries,
    ProbeValues,
    Rollout,
    RolloutGroup,
    TokenAdvantages,
    TurnCredit,
)

StageT = TypeVar("StageT", bound=Callback)


@dataclass(frozen=True, eq=False)
class CreditReport:
    """What every stage said about every rollout, groups laid end to end."""

    boundaries: list[Boundaries]
    values: list[ProbeValues]
    """Empty when the anchor needs no turn credit."""
    credits: list[TurnCredit]
    """All zeros when the anchor needs no turn credit."""
    advantages: list[TokenAdvantages]


def reader_of(prober: Prober | type[Prober], anchor: Anchor | type[Anchor]) -> Reader:
    """Return which model is read for credit; a prober that is never run reads none."""
    return prober.reader if anchor.needs_turn_credit else "none"


@dataclass(frozen=True)
class CreditPipeline:
    """The four stages in their order."""

    segmenter: Segmenter
    prober: Prober
    backup: Backup
    anchor: Anchor

    @property
    def reader(self) -> Reader:
        """Which model these stages read."""
        return reader_of(self.prober, self.anchor)

    @classmethod
    def from_callbacks(cls, callbacks: Iterable[Callback]) -> Self:
        """Return the pipeline of the stages among a trainer's callbacks.

        Args:
            callbacks: all callbacks of a trainer; those that are no stage are passed over.

        Returns:
            The pipeline.

        Raises:
            ConfigError: unless there is exactly one stage of each kind.
        """
        seen = list(callbacks)
        return cls(
            segmenter=_only("segmenter", [c for c in seen if isinstance(c, Segmenter)], seen),
            prober=_only("prober", [c for c in seen if isinstance(c, Prober)], seen),
            backup=_only("backup", [c for c in seen if isinstance(c, Backup)], seen),
            anchor=_only("anchor", [c for c in seen if isinstance(c, Anchor)], seen),
        )

    def run(
        self, groups: Sequence[RolloutGroup], scorer: Scorer, template: Template
    ) -> CreditReport:
        """Return the token advantages of all rollouts, and how they came about.

        Args:
            groups: the rollouts of one phase, grouped by question.
            scorer: gives log-probs of answers after prefixes.
            template: gives the tokens of an answer, and the text of tokens.

        Returns:
            One entry per rollout in each list, in the order of the groups.

        Raises:
            CreditError: if a stage returns too few, too many, misplaced or non-finite numbers.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        boundaries = [self.segmenter.segment(rollout, template) for rollout in rollouts]
        check_results("credit.segmenter", rollouts, boundaries)
        for rollout, ends in zip(rollouts, boundaries, strict=True):
            check_boundaries(rollout, ends)
        values: list[ProbeValues] = []
        if self.anchor.needs_turn_credit:
            values = self.prober.probe(rollouts, boundaries, scorer, template)
            credits = self._back_up(rollouts, boundaries, values)
        else:
            credits = [
                TurnCredit(ends.rollout_id, torch.zeros(ends.num_turns)) for ends in boundaries
            ]
        advantages = self._anchor_groups(groups, boundaries, values, credits)
        return CreditReport(boundaries, values, credits, advantages)

    def _back_up(
        self,
        rollouts: Sequence[Rollout],
        boundaries: Sequence[Boundaries],
        values: Sequence[ProbeValues],
    ) -> list[TurnCredit]:
        check_results("credit.prober", rollouts, values)
        for ends, probed in zip(boundaries, values, strict=True):
            check_values(ends, probed)
        credits = [self.backup.backup(probed) for probed in values]
        check_results("credit.backup", rollouts, credits)
        for ends, credit in zip(boundaries, credits, strict=True):
            check_credit(ends, credit)
        return credits

    def _anchor_groups(
        self,
        groups: Sequence[RolloutGroup],
        boundaries: Sequence[Boundaries],
        values: Sequence[ProbeValues],
        credits: Sequence[TurnCredit],
    ) -> list[TokenAdvantages]:
        advantages: list[TokenAdvantages] = []
        for group in groups:
            start, stop = len(advantages), len(advantages) + len(group.rollouts)
            anchored = self.anchor.anchor(
                group, boundaries[start:stop], values[start:stop], credits[start:stop]
            )
            check_results("credit.anchor", group.rollouts, anchored)
            for rollout, ends, result in zip(
                group.rollouts, boundaries[start:stop], anchored, strict=True
            ):
                check_advantages(rollout, ends, result)
            advantages.extend(anchored)
        return advantages


def _only(slot: str, stages: Sequence[StageT], callbacks: Sequence[Callback]) -> StageT:
    if len(stages) == 1:
        return stages[0]
    names = [type(callback).__name__ for callback in callbacks]
    raise ConfigError(
        f"Expected exactly one {slot} among the callbacks, got {len(stages)} in {names}. "
        f"Set the slot `credit.{slot}` once and list no stage under `trainer.callbacks`."
    )
