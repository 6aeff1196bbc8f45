"""What the agent loop asks of tools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from trace_pl.types import Question, ToolCall, ToolResult


class ToolSession(ABC):
    """The tools as one rollout sees them.

    A session lives from the prompt of a rollout to its end and may keep state. Its methods run on
    the threads of tool calls, one at a time, so slow ones keep nobody waiting; a call that ran out
    of time may still be running when the session is called again or closed.
    """

    has_opening: ClassVar[bool] = False
    """Whether :meth:`open` has to run before the prompt is made; without, it is never called."""

    def open(self) -> str:
        """Begin, and return what the prompt adds to the question; often nothing."""
        return ""

    @abstractmethod
    def call(self, call: ToolCall, /) -> ToolResult:
        """Run a call; mistakes of the policy are results, exceptions are the service's failures."""

    def close(self) -> None:  # noqa: B027  (most sessions hold nothing)
        """Give back what the session holds; called once, however the rollout ended."""


class Toolbox(ABC):
    """Tools that many rollouts use at once; chosen as `data.tools`, or given by the task.

    A toolbox describes its tools for the prompt and makes a session for each rollout. One made of
    functions or of a class of your own is :class:`FunctionTools` or :class:`EnvironmentTools`;
    subclass this for anything else.
    """

    @abstractmethod
    def schemas(self) -> list[dict[str, Any]]:
        """Return the tools' JSON schemas for the chat template."""

    @abstractmethod
    def session(self, question: Question, /) -> ToolSession:
        """Return fresh tools for one rollout of a question, at once: slow work is ``open``'s."""
