"""The order in which questions are asked, which a resumed run goes on with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from trace_pl.data.questions import fingerprint
from trace_pl.errors import ConfigError
from trace_pl.types import Question


class QuestionStream:
    """Gives questions without end; every pass over the data has its own seeded order.

    Args:
        questions: At least one.
        seed: Of the orders.
    """

    def __init__(self, questions: Sequence[Question], seed: int) -> None:
        self.questions = questions
        self.seed = seed
        self._cursor = 0

    def take(self, count: int) -> list[Question]:
        """Return the next ``count`` questions."""
        found: list[Question] = []
        while len(found) < count:
            number, position = divmod(self._cursor, len(self.questions))
            order = list(range(len(self.questions)))
            random.Random(f"order-{self.seed}-{number}").shuffle(order)
            wanted = order[position : position + count - len(found)]
            found.extend(self.questions[i] for i in wanted)
            self._cursor += len(wanted)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands, and in which data."""
        return {"cursor": self._cursor, "fingerprint": fingerprint(self.questions)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another stream over the same questions stood.

        Raises:
            ConfigError: if the questions are others.
        """
        current = fingerprint(self.questions)
        if state_dict["fingerprint"] != current:
            raise ConfigError(
                "Expected the training questions of the checkpoint, got others (fingerprint "
                f"{current[:12]}, saved {state_dict['fingerprint'][:12]}). Use the same task, or "
                "start a new run from the exported weights."
            )
        self._cursor = state_dict["cursor"]
