"""`trace-pl predict` leaves one JSON line for each rollout, enough to judge it without a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from trace_pl.distributed.leader import is_leader, to_leader
from trace_pl.files import require_writable, unused_name, write_atomically
from trace_pl.rollout.chat.template import ChatTemplate, message
from trace_pl.training.datamodule import data_module
from trace_pl.training.minibatch import EvaluationBatch
from trace_pl.training.run_folder import run_folder
from trace_pl.types import Question, Rollout, RolloutGroup, TokenKind

_LOST: dict[str, Any] = {
    "answer": None,
    "is_correct": None,
    "reward": None,
    "stop_reason": None,
    "policy_version": None,
    "prompt": None,
    "messages": [],
    "final_message": None,
    "turns": [],
    "tokens": None,
    "logprob": None,
}


class RolloutWriter(Callback):
    """Writes predicted rollouts to ``rollouts.jsonl`` in the run's folder, in order of questions.

    One process writes those of all ranks, in one rename. A run without a logger has no folder of
    its own: it writes to ``trainer.default_root_dir``, beside what an earlier one left there.

    Args:
        file_name: Name of the file.
    """

    def __init__(self, file_name: str = "rollouts.jsonl") -> None:
        """Start with nothing sampled."""
        self.file_name = file_name
        self._groups: dict[int, RolloutGroup] = {}

    def on_predict_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Make sure that a file can be written before anything is sampled for it."""
        self._groups = {}
        folder = _folder(trainer)
        if is_leader():
            require_writable(folder, "`trainer.logger` or `trainer.default_root_dir`")

    def on_predict_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: EvaluationBatch,
        batch: EvaluationBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep what was sampled."""
        self._groups.update(zip(outputs.positions, outputs.groups, strict=True))

    def on_predict_epoch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Bring all ranks' lines together, write the file and say where it is."""
        folder = _folder(trainer)
        data = data_module(trainer)
        run = {
            "model": pl_module.model_name,
            "checkpoint": str(trainer.ckpt_path) if trainer.ckpt_path else None,
            "config": str(folder / "config.yaml") if trainer.loggers else None,
        }
        lines: dict[int, list[str]] = {}
        for position, group in self._groups.items():
            records = [
                rollout_record(r, data.template, data.agent.system_prompt) for r in group.rollouts
            ]
            records = records or [lost_record(group.question)]
            lines[position] = [_line({**record, "run": run}) for record in records]
        ranks = to_leader(lines)
        if is_leader():
            by_position = dict(sorted(chain.from_iterable(each.items() for each in ranks)))
            written = list(chain.from_iterable(by_position.values()))
            path = unused_name(folder / self.file_name)
            write_atomically(path, "".join(written))
            print(f"{len(written):,} rollouts in {path}")


def rollout_record(
    rollout: Rollout, template: ChatTemplate, system_prompt: str = ""
) -> dict[str, Any]:
    """Return what a person or a script wants to know of a rollout, without tensors.

    ``messages`` holds all text once. ``turns[k]["message"]`` is the position of the policy's
    message that made call k; the result of the call is the message after it. ``logprob`` is the sum
    of the sampling log-probs, in nats.
    """
    asked = rollout.question.text + rollout.opening
    messages: list[Mapping[str, Any]] = [*template.opening(system_prompt, asked)]
    turns = []
    for turn in rollout.turns:
        span = slice(turn.action_start, turn.action_stop)
        turns.append(
            {
                "message": len(messages),
                "tool": turn.call.name,
                "arguments": dict(turn.call.arguments),
                "error": turn.result.error,
                "docids": list(turn.result.docids),
                "score": turn.result.score,
                "tokens": turn.action_stop - turn.action_start,
                "logprob": _sum(rollout, span),
            }
        )
        messages.append(message("assistant", _sampled_text(rollout, span, template)))
        messages.append(message("tool", turn.result.text))
    tail = rollout.turns[-1].observation_stop if rollout.turns else rollout.prompt_length
    final = None
    if bool(rollout.loss_mask[tail:].any()):
        final = _sampled_text(rollout, slice(tail, None), template)
        messages.append(message("assistant", final))
    counts = {kind: int((rollout.kinds == kind).sum()) for kind in TokenKind}
    return {
        **_question_fields(rollout.question),
        "answer": rollout.answer,
        "is_correct": rollout.is_correct,
        "reward": rollout.reward,
        "stop_reason": rollout.stop_reason.value,
        "policy_version": rollout.policy_version,
        "prompt": template.decode(rollout.token_ids[: rollout.prompt_length].tolist()),
        "messages": messages,
        "final_message": final,
        "turns": turns,
        "tokens": {kind.name.lower(): count for kind, count in counts.items()},
        "logprob": _sum(rollout, slice(None)),
    }


def lost_record(question: Question) -> dict[str, Any]:
    """Return the record of a question whose rollout failed through no fault of the policy.

    It has the same fields as others, so that a share of all questions can be taken.
    """
    return {**_question_fields(question), **_LOST}


def _question_fields(question: Question) -> dict[str, Any]:
    return {
        "question_id": question.id,
        "question": question.text,
        "gold": list(question.answers),
        "meta": dict(question.meta),
    }


def _sampled_text(rollout: Rollout, span: slice, template: ChatTemplate) -> str:
    """Return what the policy wrote in a span, thinking included, without the token that ends it."""
    ids = rollout.token_ids[span][rollout.loss_mask[span]].tolist()
    is_ended = ids[-1] in template.stop_ids
    text = template.decode(ids[:-1] if is_ended else ids)
    return f"<think>\n{text}" if template.thinking_open else text


def _sum(rollout: Rollout, span: slice) -> float:
    return round(float(rollout.logprobs[span].double().sum()), 4)


def _folder(trainer: lightning.Trainer) -> Path:
    return run_folder(trainer) or Path(trainer.default_root_dir)


def _line(record: Mapping[str, Any]) -> str:
    # A task may put anything into a question's meta.
    return json.dumps(record, ensure_ascii=False, default=str) + "\n"
