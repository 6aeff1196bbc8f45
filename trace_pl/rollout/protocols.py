"""What the agent loop asks of tools and progress displays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from trace_pl.types import ToolCall, ToolResult


@dataclass(frozen=True, slots=True)
class RolloutCounts:
    """How far a collection of rollouts is."""

    total: int = 0
    """Rollouts that were started."""
    finished: int = 0
    tokens: int = 0
    """Sampled so far, in rollouts that are not finished as well."""
    turns: int = 0
    """Tool turns of the finished rollouts."""
    tool_errors: int = 0
    """Error observations and failures of tool services so far."""
    reward_failures: int = 0
    """Rollouts left out because their reward failed."""


Progress = Callable[[RolloutCounts], None]
"""Told the counts after every step of the engine."""


class ToolSession(Protocol):
    """The tools as one rollout sees them."""

    def call(self, call: ToolCall, /) -> ToolResult:
        """Run a call; mistakes of the policy are results, exceptions are failures of the service.

        A call that ran out of time may still be running when it is made again.
        """


class Toolbox(Protocol):
    """Tools that many rollouts use at once."""

    def schemas(self) -> list[dict[str, Any]]:
        """Return the tools' JSON schemas for the chat template."""

    def session(self, question: str, /) -> ToolSession:
        """Return fresh tools for one rollout of a question."""
