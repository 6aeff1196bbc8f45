"""Which questions of a task a run asks, counted before anything is sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning.pytorch.utilities import rank_zero_only

from trace_pl.errors import ConfigError, DataError
from trace_pl.tasks.protocol import Split, Task
from trace_pl.types import Question

_SPLITS: dict[str, tuple[Split, ...]] = {
    "fit": ("train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
    "predict": ("test",),
}
_SETTINGS: dict[Split, str] = {
    "train": "data.questions_per_epoch",
    "validation": "data.evaluation_questions",
    "test": "data.test_questions",
}


class AskedQuestions:
    """The questions of each split as far as they are asked, read once.

    Args:
        task: Task that they come from.
        at_least: Training questions that one epoch takes.
        at_most: Limits of the other splits; None takes all.
    """

    def __init__(self, task: Task, at_least: int, at_most: Mapping[Split, int | None]) -> None:
        self.task = task
        self.at_least = at_least
        self.at_most = at_most
        self._questions: dict[Split, list[Question]] = {}
        self._checked: set[Split] = set()

    def read(self, stage: str, num_ranks: int, check: Callable[[Question], None]) -> None:
        """Read, count and check what a stage asks; what was checked before is not checked again.

        Args:
            stage: ``fit``, ``validate``, ``test`` or ``predict``.
            num_ranks: Processes that share the questions.
            check: Raises for a question that no rollout could answer.

        Raises:
            ConfigError: if an epoch takes more training questions than there are, or ranks would
                be left without a question.
            DataError: if there is none.
        """
        for split in _SPLITS[stage]:
            self._require(split, len(self.questions(split)), num_ranks)
        for split in _SPLITS[stage]:
            if split not in self._checked:
                for question in self.questions(split):
                    check(question)
                self._checked.add(split)

    def questions(self, split: Split) -> list[Question]:
        """Return the questions of a split that are asked; a limit that cuts is printed."""
        if split not in self._questions:
            found, limit = self.task.questions(split), self.at_most.get(split)
            self._questions[split] = found[:limit]
            if limit is not None and limit < len(found):
                _say(f"{limit:,} of {len(found):,} {split} questions ({_SETTINGS[split]})")
        return self._questions[split]

    def _require(self, split: Split, count: int, num_ranks: int) -> None:
        if not count:
            raise DataError(
                f"Expected at least one {split} question from {type(self.task).__name__}, got none."
            )
        if split == "train" and count < self.at_least:
            raise ConfigError(
                f"Expected at least {self.at_least} training questions for one epoch "
                f"(data.questions_per_epoch and data.extra_questions), got {count}. Lower these "
                "numbers or add questions."
            )
        if count < num_ranks:
            raise ConfigError(
                f"Expected at least one {split} question for each of {num_ranks} ranks, got "
                f"{count}. Lower trainer.devices, or raise {_SETTINGS[split]} or the number of "
                "questions."
            )


@rank_zero_only
def _say(text: str) -> None:
    print(text)
