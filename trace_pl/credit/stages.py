"""The four stages of credit assignment: what a user swaps.

Each is a Lightning callback with one typed method. A stage gets all it needs as arguments and
returns a frozen result; it keeps nothing between calls and does not rely on hook order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from lightning.pytorch.callbacks import Callback

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

Reader = Literal["reference", "policy", "none"]
"""Which model answers a prober: the frozen one, the policy as the epoch began, or nobody."""


class Segmenter(Callback, ABC):
    """Says where a rollout's prefixes end."""

    @abstractmethod
    def segment(self, rollout: Rollout, template: Template) -> Boundaries:
        """Return the N + 1 boundaries of ``rollout``; the tokens between two are one turn.

        Args:
            rollout: one finished trajectory.
            template: gives the text of tokens.

        Returns:
            Strictly increasing prefix ends within the rollout.
        """


class Prober(Callback, ABC):
    """Measures at every boundary how ready a model is to give the gold answer."""

    reader: ClassVar[Reader] = "reference"
    """Which model the scorer passed in reads with. The reference is loaded only if it is asked."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "reads_policy"):
            raise ConfigError(
                f"Expected `reader` in {cls.__name__}, got `reads_policy`, which nobody reads. "
                "Write reader = 'policy', or leave it out for the reference."
            )

    @abstractmethod
    def probe(
        self,
        rollouts: Sequence[Rollout],
        boundaries: Sequence[Boundaries],
        scorer: Scorer,
        template: Template,
    ) -> list[ProbeValues]:
        """Return the values of all boundaries of all rollouts.

        Args:
            rollouts: the rollouts of a whole phase, of one or many questions.
            boundaries: one for each rollout.
            scorer: gives log-probs of answers after prefixes.
            template: gives the tokens of an answer, and the text of tokens.

        Returns:
            One result for each rollout, in order, with N + 1 finite values.
        """


class Backup(Callback, ABC):
    """Turns the values at boundaries into the credit of turns."""

    @abstractmethod
    def backup(self, values: ProbeValues) -> TurnCredit:
        """Return the credit of each turn of one rollout.

        Args:
            values: N + 1 values of one rollout.

        Returns:
            N finite numbers.
        """


class Anchor(Callback, ABC):
    """Joins turn credit and outcome into token advantages; the only writer of advantages."""

    needs_turn_credit: ClassVar[bool] = True
    """When false, prober and backup are not run and the credit passed in is all zeros."""

    @abstractmethod
    def anchor(
        self,
        group: RolloutGroup,
        boundaries: Sequence[Boundaries],
        credits: Sequence[TurnCredit],
    ) -> list[TokenAdvantages]:
        """Return the token advantages of every rollout of one question.

        Args:
            group: the G rollouts of one question.
            boundaries: one for each rollout.
            credits: one for each rollout, N numbers each.

        Returns:
            One result for each rollout, in order, zero on every token that was not sampled.
        """
