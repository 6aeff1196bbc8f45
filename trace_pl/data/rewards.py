"""What a finished rollout is worth, and whether its answer is right: two things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from trace_pl.data.matching import exact_match
from trace_pl.errors import ConfigError
from trace_pl.types import Grade, Question, Turn


class Reward(Protocol):
    """Grades finished rollouts; chosen as `data.reward`, a class or a function of your own module.

    A function, or an object with this method, plain or ``async``::

        class Judge:  # in my_rewards.py, used as --data.reward my_rewards.Judge
            async def __call__(
                self, question: Question, answer: str | None, turns: Sequence[Turn]
            ) -> Grade:
                is_right = answer is not None and await ask_a_judge(question.text, answer)
                return Grade(reward=1.0 if is_right else 0.0, is_correct=is_right)

    It runs on several threads at once, beside the engine. An exception or an attempt that takes
    longer than `limits.reward_timeout_s` is tried again up to `limits.reward_retries` times; then
    the rollout is left out of its group. Each call of an ``async`` reward has an event loop of its
    own, so clients that belong to a loop are made inside the call.
    """

    # Any, for the command line accepts no implementation that names a type in other words.
    def __call__(self, question: Any, answer: Any, turns: Any, /) -> Any:  # noqa: ANN401
        """Return the :class:`Grade`, or what gives one when it is awaited.

        Args:
            question: the :class:`Question` with its gold answers.
            answer: text of the final answer, None if there was none.
            turns: the tool turns, a sequence of :class:`Turn`.
        """


class ExactMatchReward:
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
