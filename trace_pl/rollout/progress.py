"""How far a collection of rollouts is, and the bar that shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from tqdm import tqdm


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


class RolloutBar:
    """Shows trajectories, tokens per second, mean turns and tool errors, where there is a terminal.

    Args:
        what: goes before the bar.
        file: stream that it is shown on; None means stderr, if that is a terminal.
    """

    def __init__(self, what: str, file: TextIO | None = None) -> None:
        self._bar = tqdm(
            desc=what, unit="traj", leave=False, file=file, disable=None if file is None else False
        )

    def show(self, counts: RolloutCounts) -> None:
        """Show new counts."""
        self._bar.total = counts.total
        self._bar.set_postfix_str(describe(counts, self._seconds()), refresh=False)
        self._bar.update(counts.finished - self._bar.n)

    def _seconds(self) -> float:
        return float(self._bar.format_dict["elapsed"])

    def __enter__(self) -> RolloutBar:
        """Return the bar itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the bar."""
        self._bar.close()


def describe(counts: RolloutCounts, seconds: float) -> str:
    """Return what the bar says beside the number of trajectories."""
    lost = f", {counts.reward_failures} reward failures" if counts.reward_failures else ""
    return (
        f"{counts.tokens / max(seconds, 1e-9):,.0f} tok/s, "
        f"{counts.turns / max(counts.finished, 1):.1f} turns, "
        f"{counts.tool_errors} tool errors{lost}"
    )
