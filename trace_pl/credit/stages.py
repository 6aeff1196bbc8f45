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
    """Cuts a rollout into turns.

    A rollout is one long row of tokens. A segmenter names N + 1 places in it, the boundaries, at
    which a prober will later ask "how close is the answer now?". The tokens between two boundaries
    are one turn: the unit that earns credit. Cut at tool calls, a turn is a call with what it
    brought (TRACE); cut more finely, credit can tell good from bad stretches of thinking, at the
    price of more probes.
    """

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
    """Measures at every boundary how ready a model is to give the gold answer.

    A prober gives what a critic gives elsewhere, a value for each state, but learns nothing for it:
    it puts the gold answer after each prefix and reads how likely a model finds it. A prefix that
    holds the right pages makes the answer likely. The frozen reference keeps the yardstick still
    while the policy moves; the policy itself is an ablation.
    """

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
    """Turns the values at boundaries into the credit of turns.

    The gain of a turn, V_{k+1} - V_k, says what it brought at once. A search often pays only when a
    later turn reads what it found, so a backup passes gains on to earlier turns: none of them with
    one step, all of them with Monte Carlo, and between the two it trades bias for variance, as
    n-step returns do. Credit is in the unit of values, nats.
    """

    @abstractmethod
    def backup(self, values: ProbeValues) -> TurnCredit:
        """Return the credit of each turn of one rollout.

        Args:
            values: N + 1 values of one rollout.

        Returns:
            N finite numbers.
        """


class Anchor(Callback, ABC):
    """Joins turn credit and outcome into token advantages; the only writer of advantages.

    Turn credit alone would reward a rollout that gathers evidence and then answers wrongly. An
    anchor ties it to the outcome: it compares each rollout's reward with the others of its
    question, adds the credit of each turn, and spreads the sum over the tokens that the policy
    sampled. An anchor whose ``needs_turn_credit`` is false makes do without probes, as GRPO does.
    """

    needs_turn_credit: ClassVar[bool] = True
    """When false, prober and backup are not run and the credit passed in is all zeros."""

    @abstractmethod
    def anchor(
        self,
        group: RolloutGroup,
        boundaries: Sequence[Boundaries],
        values: Sequence[ProbeValues],
        credits: Sequence[TurnCredit],
    ) -> list[TokenAdvantages]:
        """Return the token advantages of every rollout of one question.

        Args:
            group: the G rollouts of one question.
            boundaries: one for each rollout.
            values: one for each rollout, N + 1 numbers each; none at all if
                ``needs_turn_credit`` is false.
            credits: one for each rollout, N numbers each.

        Returns:
            One result for each rollout, in order, zero on every token that was not sampled.
        """
