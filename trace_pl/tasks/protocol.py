"""A task: questions in disjoint splits, and the tools to answer them with."""

from __future__ import annotations

from typing import Literal, Protocol

from trace_pl.tools.protocol import Toolbox
from trace_pl.types import Question

Split = Literal["train", "validation", "test"]


class Task(Protocol):
    """What the data module needs to know of a task."""

    def questions(self, split: Split) -> list[Question]:
        """Return the questions of a split, in a fixed order."""

    def toolbox(self) -> Toolbox:
        """Return the tools, ready for many rollouts at once."""
