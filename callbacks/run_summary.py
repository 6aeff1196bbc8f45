"""Success before and after, written to `summary.json` and printed when the run ends."""

from __future__ import annotations

import json
import platform
import time
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from trace_pl.commands.shell import program
from trace_pl.credit.stages import Anchor
from trace_pl.files import write_atomically
from trace_pl.training.datamodule import data_module
from trace_pl.training.run_folder import run_folder

_PACKAGES = ("torch", "lightning", "transformers", "torchmetrics", "jsonargparse", "tantivy")


class RunSummary(Callback):
    """Keeps the evaluation before training and the last one of a run, and says what came of it.

    The first is the Trainer's sanity check (`num_sanity_val_steps: -1`), which runs on all held-out
    questions before any update; without it, what was before stays unknown.
    """

    def __init__(self) -> None:
        """Start with nothing measured."""
        self._before: dict[str, float] = {}
        self._after: dict[str, float] = {}
        self._start = 0.0
        self._train_start: float | None = None

    @property
    def state_key(self) -> str:
        """Name of this callback's part of a checkpoint."""
        return "RunSummary"

    def state_dict(self) -> dict[str, Any]:
        """Keep both evaluations, so that a resumed run still knows where it began."""
        return {"before": self._before, "after": self._after}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both evaluations; a checkpoint of an older version has neither."""
        self._before = dict(state_dict.get("before", {}))
        self._after = dict(state_dict.get("after", {}))

    def on_fit_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Start the clock of training proper."""
        self._train_start = time.perf_counter()

    def on_validation_epoch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Remember this evaluation; log the first one, which Lightning itself would drop."""
        metrics = {
            name.removeprefix("validation/"): float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith("validation/")
        }
        if not trainer.sanity_checking:
            self._after = metrics
        elif metrics and not self._before:
            self._before = metrics
            if trainer.logger is not None:
                first = {f"validation/{name}": value for name, value in metrics.items()}
                trainer.logger.log_metrics(first | {"epoch": 0.0}, step=0)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Write and print the summary."""
        folder = run_folder(trainer)  # a broadcast, so every rank has to ask
        if folder is None or not trainer.is_global_zero:
            return
        summary = self._summary(trainer, folder)
        write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        stages = [c for c in trainer.callbacks if isinstance(c, Anchor)]  # type: ignore[attr-defined]
        has_turn_credit = any(anchor.needs_turn_credit for anchor in stages)
        print(render_summary(summary, folder, len(trainer.loggers), has_turn_credit))

    def _summary(self, trainer: lightning.Trainer, folder: Path) -> dict[str, Any]:
        before, after = self._before, self._after
        now = time.perf_counter()
        began = now if self._train_start is None else self._train_start
        data = data_module(trainer)
        checkpoint = trainer.checkpoint_callback
        path = ""
        if isinstance(checkpoint, ModelCheckpoint):
            path = checkpoint.last_model_path or checkpoint.best_model_path
        return {
            "success_before": before.get("success"),
            "success_after": after.get("success"),
            "questions": len(data.asked.questions("validation")),
            "epochs": trainer.current_epoch,
            "updates": trainer.global_step,
            "tool_turns_before": before.get("tool_turns"),
            "tool_turns_after": after.get("tool_turns"),
            "evidence_recall_before": before.get("evidence_recall"),
            "evidence_recall_after": after.get("evidence_recall"),
            "seconds": round(now - self._start, 1),
            "training_seconds": round(now - began, 1),
            "checkpoint": path,
            "tensorboard": str(folder),
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in _PACKAGES},
            },
        }


def render_summary(
    summary: dict[str, Any], folder: Path, num_loggers: int = 1, has_turn_credit: bool = True
) -> str:
    """Return the few lines a person wants to read when a run has ended.

    Args:
        summary: What is written to `summary.json`.
        folder: Folder of the run.
        num_loggers: Number of loggers; with several, a command can set no version.
        has_turn_credit: Whether the same run without it would be another.
    """
    config = quote(str(folder / "config.yaml"))
    again = f"  {program('trace-pl')} fit --config {config} --credit.anchor callbacks.OutcomeOnly"
    if not folder.name.startswith("version_"):  # a named one is refused to a second run
        again += f" --trainer.logger.init_args.version {folder.name}-grpo"
    lines = [
        "",
        f"Held-out success  {_change(summary, 'success', '.1%')}   "
        f"({summary['questions']} questions)",
        f"Tool turns        {_change(summary, 'tool_turns', '.1f')}",
        f"Training          {summary['epochs']} epochs, {summary['updates']} updates, "
        f"{summary['training_seconds']:.0f} s",
        f"Checkpoint        {summary['checkpoint'] or 'none'}",
        f"Summary           {folder / 'summary.json'}",
        "",
        "Next:",
        f"  {program('tensorboard')} --logdir {quote(str(folder.parent))}",
    ]
    if has_turn_credit and (num_loggers == 1 or folder.name.startswith("version_")):
        lines.append(f"{again}   # the same run with plain GRPO")
    return "\n".join(lines)


def _change(summary: dict[str, Any], name: str, form: str) -> str:
    values = (summary[f"{name}_before"], summary[f"{name}_after"])
    return " -> ".join("not measured" if v is None else format(v, form) for v in values)
