"""Tools with state: the public methods of an environment, one instance for each rollout."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any, ClassVar

from trace_pl.errors import RolloutError
from trace_pl.tools.described import DescribedTools
from trace_pl.tools.protocol import Toolbox, ToolSession
from trace_pl.types import Question, ToolCall, ToolResult

_NO_TOOLS = ("reset", "close", "reward", "get_reward")


class EnvironmentTools(Toolbox):
    """An environment of your own: a class whose public methods are the tools.

    The shape is that of TRL's ``environment_factory``. Every rollout gets an instance:

    - ``reset(**fields)`` begins, with ``id``, ``question`` and everything else of the question's
      row, as far as its signature takes them; a text that it returns goes to the end of the prompt;
    - public methods are tools, described by type hints and Google docstrings, plain or ``async``;
      what they return and raise is handled as by :class:`FunctionTools`;
    - ``reward()`` or ``get_reward()``, if there is one, says how far the rollout has come: what a
      call adds to it is the ``score`` of its turn, see :class:`trace_pl.tasks.EnvironmentReward`;
    - ``done``, if there is one, ends the rollout after the turn in which it becomes true;
    - ``close()``, if there is one, is called at the end, also after a failure or an interrupt.

    Args:
        environment: the class, or a function that makes an instance.
        max_characters: longest result of a call that is shown whole.

    Raises:
        ConfigError: if it has no public method, or one is not described.
    """

    def __init__(
        self, environment: type | Callable[..., Any], max_characters: int = 20_000
    ) -> None:
        self._make: Callable[[], Any] = environment
        sample = environment()
        self._tools = DescribedTools.of(_methods(sample), max_characters)
        _close(sample)

    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of the public methods."""
        return self._tools.schemas

    def session(self, question: Question) -> EnvironmentSession:
        """Return an environment that is made when the session is opened."""
        return EnvironmentSession(self._make, self._tools, question)


class EnvironmentSession(ToolSession):
    """One instance of an environment.

    Args:
        make: makes the instance.
        described: the tools of another instance; the descriptions are those of any.
        question: what the rollout is about.
    """

    has_opening: ClassVar[bool] = True

    def __init__(
        self,
        make: Callable[[], Any],
        described: DescribedTools,
        question: Question,
    ) -> None:
        self._make = make
        self._described = described
        self._question = question
        self._environment: Any = None
        self._tools: DescribedTools | None = None
        self._is_busy = Lock()
        self._is_broken = False

    def open(self) -> str:
        """Make and reset the environment; return what it says at first."""
        with self._alone():
            return self._open()

    def _open(self) -> str:
        self.close()  # of an attempt that failed
        question = self._question
        row = {**question.meta, "id": question.id, "question": question.text}
        self._environment = self._make()
        self._tools = replace(self._described, functions=_methods(self._environment))
        reset = self._environment.reset
        parameters = inspect.signature(reset).parameters.values()
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        taken = {each.name for each in parameters}
        said = reset(**{name: row[name] for name in row if takes_all or name in taken})
        return "" if said is None else str(said)

    def call(self, call: ToolCall) -> ToolResult:
        """Run a call; what it adds to the environment's reward is the result's score.

        Raises:
            RolloutError: if an earlier call failed or has not ended, so that nobody knows in what
                state the environment is.
        """
        assert self._tools is not None, "open() comes first"
        with self._alone():
            self._is_broken, was_broken = (
                True,
                self._is_broken,
            )  # until the call has come to its end
            if was_broken:
                raise RolloutError("An earlier call of this environment failed.")
            before = self._reward()
            result = self._tools.call(call)
            after = self._reward()
            self._is_broken = False
        score = None if before is None or after is None else after - before
        done = result.done or bool(getattr(self._environment, "done", False))
        return replace(result, score=score if result.score is None else result.score, done=done)

    def close(self) -> None:
        """Close the environment if it was made."""
        if self._environment is not None:
            _close(self._environment)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep a second attempt out while the first, which was given up, still runs."""
        if not self._is_busy.acquire(blocking=False):
            raise RolloutError("An earlier call of this environment has not ended.")
        try:
            yield
        finally:
            self._is_busy.release()

    def _reward(self) -> float | None:
        for name in ("reward", "get_reward"):
            method = getattr(self._environment, name, None)
            if callable(method):
                return float(method())
        return None


def _methods(environment: object) -> dict[str, Callable[..., Any]]:
    return {
        name: method
        for name, method in inspect.getmembers(environment, inspect.ismethod)
        if not name.startswith("_") and name not in _NO_TOOLS
    }


def _close(environment: Any) -> None:  # noqa: ANN401  (a class of the user's own)
    close = getattr(environment, "close", None)
    if callable(close):
        close()
