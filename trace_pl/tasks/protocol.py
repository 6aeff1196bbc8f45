"""A task: questions in disjoint splits, and the tools to answer them with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from trace_pl.tools.protocol import Toolbox
from trace_pl.types import Question

Split = Literal["train", "validation", "test"]


class Task(ABC):
    """What is asked, and what it is answered with.

    A task gives the questions of three splits that share none, each with its gold answers, and the
    tools that a rollout may call. It is read once when a run starts; rewards and the forms of calls
    and answers are slots of their own, so that a task says nothing of the model.
    """

    @abstractmethod
    def questions(self, split: Split) -> list[Question]:
        """Return the questions of a split, in a fixed order."""

    @abstractmethod
    def toolbox(self) -> Toolbox:
        """Return the tools, ready for many rollouts at once."""
