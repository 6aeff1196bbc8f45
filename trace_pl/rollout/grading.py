"""Grading finished rollouts: what a reward is, and running it on threads beside the engine."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Sequence
from numbers import Real
from typing import Any, Protocol

from trace_pl.errors import RolloutError
from trace_pl.rollout.call_runner import CallRunner
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


class Grader(CallRunner[object]):
    """Grades rollouts concurrently and never waits for a reward that hangs.

    It has threads of its own, so that slow rewards do not take those of tools.

    Args:
        reward: outcome reward, plain or ``async``.
        num_threads: rewards that run at the same time.
        timeout_s: seconds one attempt may take.
        num_retries: further attempts after a failed one.
    """

    def __init__(
        self, reward: Reward, num_threads: int, timeout_s: float, num_retries: int
    ) -> None:
        super().__init__(num_threads, timeout_s, num_retries)
        self.reward = reward
        self.name = getattr(reward, "__name__", type(reward).__name__)
        """What messages call the reward."""

    def grade(
        self, key: str, question: Question, answer: str | None, turns: Sequence[Turn]
    ) -> None:
        """Begin to grade a rollout; :meth:`poll` returns what :func:`require_grade` checks.

        Args:
            key: name of the rollout, unique among pending ones.
            question: the question with its gold answers.
            answer: text of the final answer, None if there was none.
            turns: the tool turns.
        """
        self.submit(key, lambda: self._call(question, answer, turns))

    def _call(self, question: Question, answer: str | None, turns: Sequence[Turn]) -> object:
        grade = self.reward(question, answer, turns)
        if inspect.isawaitable(grade):
            return asyncio.run(_within(self.timeout_s, grade))
        return grade


def require_grade(found: object, reward: str, rollout_id: str) -> Grade:
    """Return what a reward returned, once it is known to be a grade.

    Raises:
        RolloutError: names reward and rollout. A reward that breaks its own rules breaks them in
            every rollout, so nothing is left out for it.
    """
    if not isinstance(found, Grade):
        raise RolloutError(
            f"Expected a Grade from reward '{reward}' for rollout {rollout_id}, got "
            f"{repr(found)[:80]}. Return trace_pl.types.Grade(reward=..., is_correct=...): how "
            "much a rollout is worth does not say whether its answer is right."
        )
    if not isinstance(found.reward, Real) or not math.isfinite(found.reward):
        raise RolloutError(
            f"Expected a finite number as reward from reward '{reward}' for rollout {rollout_id}, "
            f"got {found.reward!r}. Check the reward class."
        )
    if not isinstance(found.is_correct, bool):
        raise RolloutError(
            f"Expected is_correct from reward '{reward}' for rollout {rollout_id} to be True or "
            f"False, got {found.is_correct!r}. Check the reward class."
        )
    return Grade(float(found.reward), found.is_correct)


async def _within(seconds: float, grade: Awaitable[object]) -> object:
    """Cancel what takes too long, which the runner itself can only abandon."""
    async with asyncio.timeout(seconds):
        return await grade
