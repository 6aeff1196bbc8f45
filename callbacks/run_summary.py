"""Success before and after, written to `summary.json` and printed when the run ends."""

from __future__ import annotations

import json
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from trace_pl.files import write_atomically

_PACKAGES = ("torch", "lightning", "transformers", "torchmetrics", "jsonargparse", "tantivy")


class RunSummary(Callback):
    """Keeps the first and the last evaluation of a run and says what came of it.

    The first evaluation is the Trainer's sanity check (`num_sanity_val_steps: -1`), which runs on
    all held-out questions before any update.
    """

    def __init__(self) -> None:
        """Start with nothing measured."""
        self._evaluations: list[dict[str, float]] = []
        self._seconds = {"total": 0.0, "training": 0.0}
        self._start = 0.0
        self._train_start = 0.0

    @property
    def state_key(self) -> str:
        """Name of this callback's part of a checkpoint."""
        return "RunSummary"

    def state_dict(self) -> dict[str, Any]:
        """Keep the first evaluation, so that a resumed run still knows where it began."""
        return {"first": self._evaluations[:1]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the first evaluation."""
        self._evaluations = list(state_dict["first"])

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
        if not metrics or (trainer.sanity_checking and self._evaluations):
            return
        metrics["epoch"] = 0.0 if trainer.sanity_checking else trainer.current_epoch + 1.0
        self._evaluations.append(metrics)
        if trainer.sanity_checking and trainer.logger is not None:
            first = {f"validation/{name}": value for name, value in metrics.items()}
            trainer.logger.log_metrics(first, step=0)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Write and print the summary."""
        log_dir = trainer.log_dir  # a broadcast, so every rank has to ask
        if not self._evaluations or log_dir is None or not trainer.is_global_zero:
            return
        folder = Path(log_dir)
        summary = self._summary(trainer, folder)
        write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        print(render_summary(summary, folder))

    def _summary(self, trainer: lightning.Trainer, folder: Path) -> dict[str, Any]:
        first, last = self._evaluations[0], self._evaluations[-1]
        now = time.perf_counter()
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        checkpoint = trainer.checkpoint_callback
        path = checkpoint.last_model_path if isinstance(checkpoint, ModelCheckpoint) else ""
        return {
            "success_before": first["success"],
            "success_after": last["success"],
            "questions": len(data.asked.questions("validation")),
            "epochs": trainer.current_epoch,
            "updates": trainer.global_step,
            "tool_turns_before": first["tool_turns"],
            "tool_turns_after": last["tool_turns"],
            "evidence_recall_before": first.get("evidence_recall"),
            "evidence_recall_after": last.get("evidence_recall"),
            "seconds": round(now - self._start, 1),
            "training_seconds": round(now - self._train_start, 1),
            "checkpoint": path,
            "tensorboard": str(folder),
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in _PACKAGES},
            },
        }


def render_summary(summary: dict[str, Any], folder: Path) -> str:
    """Return the few lines a person wants to read when a run has ended."""
    before, after = summary["success_before"], summary["success_after"]
    turns_before, turns_after = summary["tool_turns_before"], summary["tool_turns_after"]
    lines = [
        "",
        f"Held-out success  {before:.1%} -> {after:.1%}   ({summary['questions']} questions)",
        f"Tool turns        {turns_before:.1f} -> {turns_after:.1f}",
        f"Training          {summary['epochs']} epochs, {summary['updates']} updates, "
        f"{summary['training_seconds']:.0f} s",
        f"Checkpoint        {summary['checkpoint'] or 'none'}",
        f"Summary           {folder / 'summary.json'}",
        "",
        "Next:",
        f"  tensorboard --logdir {folder.parent}",
        f"  trace-pl fit --config {folder / 'config.yaml'} --credit.anchor callbacks.OutcomeOnly"
        "   # the same run with plain GRPO",
    ]
    return "\n".join(lines)
