"""Prints one line about what makes a run hopeless or broken, with the likely cause."""

from __future__ import annotations

from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from callbacks.alarm import Alarm
from callbacks.learning_alarms import (
    LIMIT,
    ConstantCredit,
    ParityDrift,
    SurprisalCollapse,
    TurnsCollapse,
)
from callbacks.rollout_alarms import (
    EXPECTED,
    CutResponses,
    FlatGroups,
    LostRollouts,
    NoAnswers,
    NoToolCalls,
    ToolErrors,
)
from trace_pl.errors import ConfigError
from trace_pl.training.datamodule import data_module


class HealthMonitor(Callback):
    """Judges each epoch by its logged metrics and prints an alarm when it first goes off.

    ``health/*`` is 1 in each epoch in which an alarm is on, and 0 in all others. The line is
    printed once in a run, also if the run is resumed: what comes and goes is seen in ``health/*``.
    Metrics are those of all ranks, so every rank judges alike. An alarm whose metrics a run does
    not have, such as those of values where credit is outcome-only, stays off.

    Args:
        patience: Epochs in a row for which something has to be wrong.
        flat_patience: The same for groups whose rewards are all equal.
        baseline_epochs: Number of first epochs whose mean is compared with that of as many last.
        min_answer_rate: Share of rollouts with an answer.
        max_lost: Share of rollouts that are left out because the engine or a tool failed.
        max_tool_errors: Share of tool calls with an error as their result.
        max_cut: Share of rollouts that end at a token limit.
        min_surprisal: Surprisal of sampled tokens, as a share of that of the first epochs.
        min_tool_turns: Tool turns of a rollout, as a share of those of the first epochs.
        max_parity: Difference of engine and trainer after a push (mean, 99th percentile, largest),
            as a share of its limit.

    Raises:
        ConfigError: if a number of epochs is below 1, or a share not within 0 and 1.
    """

    def __init__(
        self,
        patience: int = 2,
        flat_patience: int = 5,
        baseline_epochs: int = 3,
        min_answer_rate: float = 0.02,
        max_lost: float = 0.25,
        max_tool_errors: float = 0.5,
        max_cut: float = 0.5,
        min_surprisal: float = 0.1,
        min_tool_turns: float = 0.25,
        max_parity: float = 0.5,
    ) -> None:
        """Make the alarms."""
        numbers = {
            "patience": patience,
            "flat_patience": flat_patience,
            "baseline_epochs": baseline_epochs,
        }
        for name, number in numbers.items():
            if number < 1:
                raise ConfigError(f"Expected HealthMonitor.{name} of at least 1, got {number}.")
        shares = {
            "min_answer_rate": min_answer_rate,
            "max_lost": max_lost,
            "max_tool_errors": max_tool_errors,
            "max_cut": max_cut,
            "min_surprisal": min_surprisal,
            "min_tool_turns": min_tool_turns,
            "max_parity": max_parity,
        }
        for name, share in shares.items():
            if not 0.0 <= share <= 1.0:
                raise ConfigError(f"Expected HealthMonitor.{name} within 0 and 1, got {share}.")
        self.alarms: tuple[Alarm, ...] = (
            NoAnswers(patience, min_answer_rate),
            LostRollouts(patience, max_lost),
            NoToolCalls(patience),
            FlatGroups(flat_patience),
            ToolErrors(patience, max_tool_errors),
            CutResponses(patience, max_cut),
            SurprisalCollapse(baseline_epochs, min_surprisal),
            TurnsCollapse(baseline_epochs, min_tool_turns),
            ConstantCredit(patience),
            ParityDrift(patience, max_parity),
        )
        self._history: list[dict[str, float]] = []
        self._said: set[str] = set()

    @property
    def state_key(self) -> str:
        """Name of this callback's part of a checkpoint."""
        return "HealthMonitor"

    def state_dict(self) -> dict[str, Any]:
        """Keep the epochs so far and what was said of them."""
        return {"history": self._history, "said": sorted(self._said)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._history = list(state_dict["history"])
        self._said = set(state_dict["said"])

    def on_train_epoch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Judge the epoch."""
        self._history.append(self._epoch(trainer))
        for alarm in self.alarms:
            message = alarm.message(self._history)
            pl_module.log(
                f"health/{alarm.name}",
                float(message is not None),
                on_step=False,
                on_epoch=True,
                batch_size=1,
            )
            if message is not None and alarm.name not in self._said:
                self._said.add(alarm.name)
                pl_module.print(f"Health: {message}")

    def _epoch(self, trainer: lightning.Trainer) -> dict[str, float]:
        metrics = trainer.callback_metrics
        tags = (tag for alarm in self.alarms for tag in alarm.tags if tag in metrics)
        data = data_module(trainer)
        limits = {} if data.parity is None else data.parity.limits.by_tag()
        return {
            **{LIMIT.format(tag=tag): nats for tag, nats in limits.items()},
            EXPECTED: float(data.epoch_plan.questions_per_epoch * data.epoch_plan.group_size),
            **{tag: float(metrics[tag]) for tag in tags},
        }
