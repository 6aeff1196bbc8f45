"""What the agent loop asks of tools."""

from __future__ import annotations

from typing import Any, Protocol

from trace_pl.types import ToolCall, ToolResult


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
