"""What an alarm is: a pure judgement of the metrics of a run's epochs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

Epoch = Mapping[str, float]
"""Metrics by tag; one that was not defined is missing."""

History = Sequence[Epoch]
"""The epochs of a run, oldest first."""


BROKEN = (
    "It was not so in the first epoch, so the updates broke the policy. Lower "
    "model.optimizer.init_args.lr."
)
"""The cause of what came with training, whatever it would be in a policy that is new."""


@dataclass(frozen=True)
class Alarm(ABC):
    """One thing that can be wrong with a run.

    Runs of reinforcement learning fail quietly: numbers stay finite while every answer is cut off
    or every group has one reward. An alarm reads the metrics of the epochs so far and, if one such
    thing holds for some epochs in a row, gives a single line with the likely cause and the setting
    to change. It is a pure function of the history; :class:`callbacks.HealthMonitor` asks it after
    each epoch and prints what it says once.

    Args:
        epochs: Number of epochs in a row in which it must be wrong.
    """

    name: ClassVar[str]
    tags: ClassVar[tuple[str, ...]]
    """Metrics that it reads."""
    epochs: int

    @abstractmethod
    def message(self, history: History) -> str | None:
        """Return what is wrong, the likely cause and what to change; None if all is well."""


def recent(history: History, tag: str, epochs: int) -> list[float]:
    """Return the last values of a metric; none unless each of the last epochs has one."""
    values = [epoch[tag] for epoch in history[-epochs:] if tag in epoch]
    return values if len(values) == epochs else []


def first_and_last(history: History, tag: str, epochs: int) -> tuple[float, float]:
    """Return means over the first and the last epochs of a metric; zeros if they overlap."""
    values = [epoch[tag] for epoch in history if tag in epoch]
    if len(values) < 2 * epochs:
        return 0.0, 0.0
    return fmean(values[:epochs]), fmean(values[-epochs:])


def lately(epochs: int) -> str:
    """Return how long something has been so."""
    return "the last epoch" if epochs == 1 else f"each of the last {epochs} epochs"
