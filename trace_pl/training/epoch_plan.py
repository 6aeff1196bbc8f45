"""How many questions and rollouts an epoch has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trace_pl.errors import ConfigError


@dataclass(frozen=True)
class EpochPlan:
    """What one epoch asks.

    Args:
        group_size: Rollouts of each question (G).
        questions_per_epoch: Questions whose groups are trained on, of all ranks together.
        extra_questions: Questions started beyond those.
        max_staleness: Epochs by which the weights that sampled may be older.

    Raises:
        ConfigError: if a number is too small, or extra questions should be asked ahead.
    """

    group_size: int
    questions_per_epoch: int
    extra_questions: int
    max_staleness: Literal[0, 1]

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ConfigError(
                f"Expected data.group_size of at least 2, got {self.group_size}. The outcome "
                "advantage compares rollouts of one question; the paper uses 8."
            )
        for name, least in (("questions_per_epoch", 1), ("extra_questions", 0)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"Expected data.{name} of at least {least}, got {getattr(self, name)}."
                )
        if self.extra_questions and self.max_staleness:
            raise ConfigError(
                "Expected data.extra_questions or data.max_staleness, got both. Leave one at 0: "
                "what is cancelled is asked first in the next epoch, which would have begun."
            )

    @property
    def questions_asked(self) -> int:
        """Questions that are started in an epoch."""
        return self.questions_per_epoch + self.extra_questions

    def require_question_for_each(self, num_ranks: int) -> None:
        """Refuse more ranks than questions.

        Raises:
            ConfigError: if that is so.
        """
        if self.questions_per_epoch < num_ranks:
            raise ConfigError(
                f"Expected data.questions_per_epoch of at least 1 for each of {num_ranks} ranks, "
                f"got {self.questions_per_epoch}."
            )
