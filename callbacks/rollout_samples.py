"""Readable rollouts in TensorBoard: every turn with its value and credit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning

from trace_pl.credit.pipeline import CreditReport
from trace_pl.errors import ConfigError
from trace_pl.training.credit_assigner import CreditObserver
from trace_pl.training.datamodule import data_module
from trace_pl.types import Rollout, RolloutGroup

Decode = Callable[[Sequence[int]], str]


class RolloutSamples(CreditObserver):
    """Writes the first rollouts of an epoch as text every few epochs.

    Args:
        every_n_epochs: How often to write.
        num_rollouts: How many rollouts, each of another question.
    """

    def __init__(self, every_n_epochs: int = 5, num_rollouts: int = 2) -> None:
        """Store settings."""
        if every_n_epochs < 1 or num_rollouts < 1:
            raise ConfigError(
                "Expected every_n_epochs and num_rollouts of at least 1, got "
                f"{every_n_epochs} and {num_rollouts}."
            )
        self.every_n_epochs = every_n_epochs
        self.num_rollouts = num_rollouts

    def observe(
        self, groups: tuple[RolloutGroup, ...], report: CreditReport, trainer: lightning.Trainer
    ) -> None:
        """Write, if it is time."""
        writer: Any = getattr(trainer.logger, "experiment", None)
        if trainer.current_epoch % self.every_n_epochs or not hasattr(writer, "add_text"):
            return
        data = data_module(trainer)
        turn_rewards = {a.rollout_id: a.turn_rewards.tolist() for a in report.advantages}
        for number, group in enumerate(groups[: self.num_rollouts]):
            if group.rollouts:
                rollout = group.rollouts[0]
                text = render_rollout(rollout, data.template.decode, turn_rewards[rollout.id])
                writer.add_text(f"rollout/{number}", text, trainer.global_step)


def render_rollout(rollout: Rollout, decode: Decode, turn_rewards: list[float]) -> str:
    """Return a rollout as Markdown; whatever the policy or a page wrote stays plain text."""
    question, gold = rollout.question.text, " | ".join(rollout.question.answers)
    parts = ["question and gold answer", _code(f"{question}\n{gold}")]
    for number, turn in enumerate(rollout.turns):
        action = decode(rollout.token_ids[turn.action_start : turn.action_stop].tolist())
        reward = turn_rewards[number] if number < len(turn_rewards) else 0.0
        parts.append(f"turn {number + 1}, credit {reward:+.3f}\n\n{_code(action)}")
        parts.append(_code(turn.result.text))
    tail = rollout.turns[-1].observation_stop if rollout.turns else rollout.prompt_length
    parts.append(_code(decode(rollout.token_ids[tail:].tolist())))
    grade = f"{'right' if rollout.is_correct else 'wrong'}, reward {rollout.reward:g}"
    parts.append(f"ended: {rollout.stop_reason.value}, {grade}")
    return "\n\n".join(parts)


def _code(text: str) -> str:
    # An indented block cannot be left from inside, unlike a fence; what shows it escapes it.
    return "\n".join(f"    {line}" for line in text.splitlines())
