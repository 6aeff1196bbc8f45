"""The order in which questions are asked, which a resumed run goes on with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from trace_pl.errors import ConfigError
from trace_pl.tasks.questions import fingerprint
from trace_pl.types import Question


class QuestionStream:
    """Gives questions without end; every pass over the data has its own seeded order.

    Args:
        questions: At least one.
        seed: Seed of the orders.
    """

    def __init__(self, questions: Sequence[Question], seed: int) -> None:
        self.questions = questions
        self.seed = seed
        self._cursor = 0
        self._returned: list[Question] = []
        self._order: tuple[int, list[int]] = (-1, [])  # of the pass it names

    def take(self, count: int) -> list[Question]:
        """Return the next ``count`` questions, those that were put back first.

        Rollouts are named after their question, so none comes twice if there are enough: where one
        pass ends and the next begins, the second copy waits for the next call.
        """
        is_distinct = count <= len(self.questions)
        found: list[Question] = []
        waiting: list[Question] = []
        seen: set[str] = set()
        while len(found) < count:
            question = self._returned.pop(0) if self._returned else self._next()
            if is_distinct and question.id in seen:
                waiting.append(question)
            else:
                found.append(question)
                seen.add(question.id)
        self._returned = waiting + self._returned
        return found

    def _next(self) -> Question:
        number, position = divmod(self._cursor, len(self.questions))
        if self._order[0] != number:
            order = list(range(len(self.questions)))
            random.Random(f"order-{self.seed}-{number}").shuffle(order)
            self._order = (number, order)
        self._cursor += 1
        return self.questions[self._order[1][position]]

    def put_back(self, questions: Sequence[Question]) -> None:
        """Have questions asked again before any other."""
        self._returned = [*questions, *self._returned]

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands, and in which data."""
        return {
            "cursor": self._cursor,
            "returned": [question.id for question in self._returned],
            "fingerprint": fingerprint(self.questions),
        }

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
        by_id = {question.id: question for question in self.questions}
        self._returned = [by_id[id_] for id_ in state_dict.get("returned", ())]
        self._cursor = state_dict["cursor"]
