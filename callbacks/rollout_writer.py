"""`trace-pl predict` leaves one JSON line for each rollout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import BasePredictionWriter

from trace_pl.files import write_atomically
from trace_pl.types import Rollout, RolloutGroup


class RolloutWriter(BasePredictionWriter):
    """Writes predicted rollouts to ``rollouts.jsonl`` in the run's folder.

    Args:
        file_name: Name of the file.
    """

    def __init__(self, file_name: str = "rollouts.jsonl") -> None:
        """Write once, when all predictions are there."""
        super().__init__(write_interval="epoch")
        self.file_name = file_name

    def write_on_epoch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        predictions: Sequence[list[RolloutGroup]],
        batch_indices: Sequence[Any],
    ) -> None:
        """Write the file in one rename and say where it is."""
        rollouts = [r for groups in predictions for group in groups for r in group.rollouts]
        path = Path(trainer.log_dir or trainer.default_root_dir) / self.file_name
        lines = [json.dumps(rollout_record(rollout), ensure_ascii=False) for rollout in rollouts]
        write_atomically(path, "\n".join(lines) + "\n")
        print(f"{len(rollouts)} rollouts in {path}")


def rollout_record(rollout: Rollout) -> dict[str, Any]:
    """Return what a person or a script wants to know of a rollout, without tensors."""
    return {
        "question_id": rollout.question.id,
        "question": rollout.question.text,
        "gold": list(rollout.question.answers),
        "answer": rollout.answer,
        "reward": rollout.reward,
        "stop_reason": rollout.stop_reason.value,
        "tokens": len(rollout.token_ids),
        "turns": [
            {
                "tool": turn.call.name,
                "arguments": dict(turn.call.arguments),
                "result": turn.result.text,
                "error": turn.result.error,
                "docids": list(turn.result.docids),
            }
            for turn in rollout.turns
        ],
    }
