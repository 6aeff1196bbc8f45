"""What a finished rollout is worth, and whether its answer is right: two things."""

from __future__ import annotations

from collections.abc import Sequence

from trace_pl.errors import ConfigError
from trace_pl.rollout.grading import Reward
from trace_pl.tasks.matching import exact_match, token_f1
from trace_pl.types import Grade, Question, Turn


class ExactMatchReward(Reward):
    """1 if the answer equals a gold answer after normalising, else 0; right is what equals.

    Args:
        format_bonus: Added for stating any answer in the form that `data.answer_format` reads. It
            makes no answer right. Less than 1, or a wrong answer would be worth as much as a
            right one was without it.

    Raises:
        ConfigError: if the bonus is outside 0 .. 1.
    """

    def __init__(self, format_bonus: float = 0.0) -> None:
        if not 0.0 <= format_bonus < 1.0:
            raise ConfigError(
                f"Expected a format_bonus from 0 to below 1, got {format_bonus}. Change "
                "`data.reward.init_args.format_bonus`; 0.1 is a common choice."
            )
        self.format_bonus = format_bonus

    def __call__(self, question: Question, answer: str | None, turns: Sequence[Turn]) -> Grade:
        """Return the grade."""
        is_correct = exact_match(answer, question.answers)
        has_form = answer is not None and bool(answer.strip())
        return Grade(float(is_correct) + self.format_bonus * has_form, is_correct)


class EnvironmentReward(Reward):
    """The sum of what an environment paid for the turns; right is what reaches a threshold.

    For tools with a ``reward()``, see :class:`trace_pl.tools.EnvironmentTools`.

    Args:
        threshold: sum from which a rollout counts as right.
    """

    def __init__(self, threshold: float = 1.0) -> None:
        self.threshold = threshold

    def __call__(self, question: Question, answer: str | None, turns: Sequence[Turn]) -> Grade:
        """Return the grade."""
        paid = sum(turn.result.score or 0.0 for turn in turns)
        return Grade(paid, paid >= self.threshold)


class TokenF1Reward(Reward):
    """The share of words that the answer has in common with a gold answer; right is what equals.

    Partial credit where nothing is exactly right yet. It pays for long answers that only touch the
    gold one, so `success` stays exact match.
    """

    def __call__(self, question: Question, answer: str | None, turns: Sequence[Turn]) -> Grade:
        """Return the grade."""
        return Grade(token_f1(answer, question.answers), exact_match(answer, question.answers))
