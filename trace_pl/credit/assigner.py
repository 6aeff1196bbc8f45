"""The one place where the Trainer meets the credit pipeline."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback

from trace_pl.credit.pipeline import CreditPipeline, CreditReport
from trace_pl.metrics import group_metrics, log_means, rollout_metrics
from trace_pl.module import TraceModule
from trace_pl.scoring import BranchedScorer, CachedScorer, ScoreStore
from trace_pl.types import RolloutGroup


class CreditObserver(Callback, ABC):
    """A callback that is shown each epoch's rollouts and credit, e.g. to draw them."""

    @abstractmethod
    def observe(
        self, groups: tuple[RolloutGroup, ...], report: CreditReport, trainer: lightning.Trainer
    ) -> None:
        """Look at one epoch's experience; change nothing."""


class CreditAssigner(Callback):
    """Runs the credit pipeline once per epoch, before the first minibatch, and logs what it gave.

    Args:
        tokens_per_forward: Token budget of one scoring forward.
    """

    def __init__(self, tokens_per_forward: int = 16_384) -> None:
        """Store the budget."""
        self.tokens_per_forward = tokens_per_forward
        self._pipeline: CreditPipeline | None = None
        self._known: ScoreStore | None = None

    def setup(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str
    ) -> None:
        """Collect the stages from the trainer's callbacks, exactly one per slot."""
        if stage != "fit":
            return
        self._pipeline = CreditPipeline.from_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
        path = None
        log_dir = trainer.log_dir  # a broadcast, so every rank has to ask
        if trainer.loggers and log_dir is not None:
            path = Path(log_dir) / f"reference_scores_{trainer.global_rank}.sqlite"
            path.parent.mkdir(parents=True, exist_ok=True)
        self._known = ScoreStore(path)

    def teardown(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str
    ) -> None:
        """Let go of the reference's scores."""
        if self._known is not None:
            self._known.close()
            self._known = None

    def on_train_epoch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Assign credit to the epoch's buffer."""
        assert self._pipeline is not None
        assert isinstance(pl_module, TraceModule)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        buffer = data.buffer
        start = time.perf_counter()
        with torch.no_grad(), self._scorer(pl_module) as scorer:
            report = self._pipeline.run(buffer.groups, scorer, data.template)
        buffer.assign(report.advantages)
        metrics = {
            **{f"rollout/{k}": v for k, v in rollout_metrics(buffer.rollouts).items()},
            **{f"rollout/{k}": v for k, v in group_metrics(buffer.groups).items()},
            **{f"credit/{k}": v for k, v in credit_metrics(buffer.groups, report).items()},
            "credit/scores_reused": 1.0 - scorer.num_scored / max(1, scorer.num_asked),
            "time/rollout_s": data.rollout_seconds,
            "time/credit_s": time.perf_counter() - start,
            "weights/parity_nats": data.parity,
        }
        log_means(pl_module, metrics)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, CreditObserver):
                callback.observe(buffer.groups, report, trainer)

    @contextmanager
    def _scorer(self, module: TraceModule) -> Iterator[CachedScorer]:
        """Yield the reader that the prober asks for; what the policy says is soon out of date."""
        assert self._pipeline is not None
        assert self._known is not None
        if self._pipeline.prober.reads_policy:
            with module.reading_policy() as policy:
                scorer = BranchedScorer(policy, self.tokens_per_forward)
                yield CachedScorer(scorer, ScoreStore())
            return
        with module.reading_reference() as reference:
            scorer = BranchedScorer(reference, self.tokens_per_forward)
            yield CachedScorer(scorer, self._known, module.reference_name)


def credit_metrics(groups: tuple[RolloutGroup, ...], report: CreditReport) -> dict[str, float]:
    """Return how large credit is, whence it comes, and whether it agrees with the outcome.

    ``value_outcome_correlation`` is the correlation of a rollout's last value with its reward; it
    is NaN where either is constant.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sampled = torch.cat(
        [a.advantages[r.loss_mask] for r, a in zip(rollouts, report.advantages, strict=True)]
    )
    found = {
        "advantage_abs": float(sampled.abs().mean()) if len(sampled) else 0.0,
        "trained_tokens": float((sampled != 0).float().mean()) if len(sampled) else 0.0,
        "outcome_abs": _mean(torch.tensor([abs(a.outcome_advantage) for a in report.advantages])),
        "turn_reward_abs": _mean(torch.cat([a.turn_rewards for a in report.advantages]).abs()),
        # Groups that are all right or all wrong, as far as turn credit trains them at all.
        "equal_groups_trained": _mean(
            torch.tensor(
                [a.outcome_advantage == 0.0 and bool(a.advantages.any()) for a in report.advantages]
            )
        ),
    }
    if report.values:
        last = torch.stack([v.values[-1] for v in report.values])
        rewards = torch.tensor([r.reward for r in rollouts])
        found["value_last"] = float(last.mean())
        found["readiness_start"] = _mean(torch.stack([v.mean_logprobs[0] for v in report.values]))
        found["readiness_end"] = _mean(torch.stack([v.mean_logprobs[-1] for v in report.values]))
        found["value_outcome_correlation"] = math.nan
        if len(last) > 1 and last.std() > 1e-6 and rewards.std() > 1e-6:
            correlation = torch.corrcoef(torch.stack([last.float(), rewards]))[0, 1]
            found["value_outcome_correlation"] = float(correlation)
    return found


def _mean(values: torch.Tensor) -> float:
    return float(values.float().mean()) if values.numel() else 0.0
