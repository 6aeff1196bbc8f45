"""A TensorBoard picture of readiness along the trajectory, right and wrong rollouts apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import lightning

from trace_pl.credit.pipeline import CreditReport
from trace_pl.errors import ConfigError
from trace_pl.training.credit_assigner import CreditObserver
from trace_pl.types import RolloutGroup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[tuple[int, float]]]


class ValueCurve(CreditObserver):
    """Draws the mean value V_k over the boundary number k every few epochs.

    Args:
        every_n_epochs: How often to draw.
    """

    def __init__(self, every_n_epochs: int = 5) -> None:
        """Store the interval."""
        if every_n_epochs < 1:
            raise ConfigError(f"Expected every_n_epochs of at least 1, got {every_n_epochs}.")
        self.every_n_epochs = every_n_epochs

    def observe(
        self, groups: tuple[RolloutGroup, ...], report: CreditReport, trainer: lightning.Trainer
    ) -> None:
        """Draw, if it is time and there are values (an outcome-only run has none)."""
        writer: Any = getattr(trainer.logger, "experiment", None)
        due = trainer.current_epoch % self.every_n_epochs == 0
        if due and report.values and hasattr(writer, "add_figure"):
            figure = draw_value_curves(value_curves(groups, report))
            writer.add_figure("credit/value_curve", figure, trainer.global_step)


def value_curves(groups: Sequence[RolloutGroup], report: CreditReport) -> Curves:
    """Return mean value per boundary number, for right and for wrong rollouts."""
    values: dict[tuple[bool, int], list[float]] = defaultdict(list)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout, probe in zip(rollouts, report.values, strict=True):
        for boundary, value in enumerate(probe.values.tolist()):
            values[rollout.is_correct, boundary].append(value)
    return {
        name: [(k, fmean(v)) for (correct, k), v in sorted(values.items()) if correct is wanted]
        for name, wanted in (("right answer", True), ("wrong answer", False))
    }


def draw_value_curves(curves: Curves) -> Figure:
    """Return the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    for (name, points), colour in zip(curves.items(), ("tab:green", "tab:red"), strict=True):
        axes.plot(
            *zip(*points, strict=True) if points else ((), ()), "o-", label=name, color=colour
        )
    axes.axhline(0.0, color="0.7", linewidth=0.8)
    axes.set(xlabel="tool boundary k", ylabel="value V_k (nats)")
    axes.legend(frameon=False)
    return figure
