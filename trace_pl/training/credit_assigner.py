"""The one place where the Trainer meets the credit pipeline."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from trace_pl.credit.pipeline import CreditPipeline, CreditReport
from trace_pl.errors import CreditError
from trace_pl.probes import ProbeRequest
from trace_pl.scoring import BranchedScorer, CachedScorer, ScoreStore
from trace_pl.training.metrics import EpochMetrics
from trace_pl.training.module import TraceModule
from trace_pl.training.rollout_metrics import group_items, rollout_items
from trace_pl.training.run_folder import run_folder
from trace_pl.types import Rollout, RolloutGroup


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
        assert isinstance(pl_module, TraceModule)
        # Lightning sets up callbacks before it asks the module for its models.
        pl_module.credit_reads_reference = self._pipeline.reader == "reference"
        path = None
        folder = run_folder(trainer)  # a broadcast, so every rank has to ask
        if folder is not None and self._pipeline.reader == "reference":
            path = folder / f"reference_scores_{trainer.global_rank}.sqlite"
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
        metrics = experience_metrics(buffer.groups, report)
        metrics.average(
            {
                "credit/scores_reused": reused(scorer),
                "time/rollout_s": torch.tensor(data.rollout_seconds),
                "time/credit_s": torch.tensor(time.perf_counter() - start),
            }
        )
        metrics.largest("weights/parity_nats", torch.tensor(data.parity))
        metrics.log(pl_module)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, CreditObserver):
                callback.observe(buffer.groups, report, trainer)

    @contextmanager
    def _scorer(self, module: TraceModule) -> Iterator[CachedScorer]:
        """Yield the reader that the prober asks for; what the policy says is soon out of date."""
        assert self._pipeline is not None
        assert self._known is not None
        if self._pipeline.reader == "none":
            yield CachedScorer(NoScorer(), ScoreStore())
            return
        if self._pipeline.reader == "policy":
            with module.reading_policy() as policy:
                scorer = BranchedScorer(policy, self.tokens_per_forward)
                yield CachedScorer(scorer, ScoreStore())
            return
        with module.reading_reference() as reference:
            scorer = BranchedScorer(reference, self.tokens_per_forward)
            yield CachedScorer(scorer, self._known, module.reference_name)


class NoScorer:
    """Stands where no stage reads a model."""

    def score(self, requests: Sequence[ProbeRequest]) -> list[Tensor]:
        """Refuse to answer.

        Raises:
            CreditError: if anything is asked.
        """
        if not requests:
            return []
        raise CreditError(
            f"Expected no question of a prober whose `reader` is 'none', got {len(requests)}. Set "
            "the class attribute `reader` to 'reference' or 'policy'."
        )


def experience_metrics(groups: tuple[RolloutGroup, ...], report: CreditReport) -> EpochMetrics:
    """Return ``rollout/*`` and ``credit/*`` of one epoch.

    ``value_outcome_correlation`` is the correlation of a rollout's last value with its reward.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics = EpochMetrics()
    for items in (rollout_items(rollouts), group_items(groups)):
        metrics.average({f"rollout/{name}": values for name, values in items.items()})
    metrics.total("rollout/count", len(rollouts))
    items = credit_items(rollouts, report)
    metrics.average({f"credit/{name}": values for name, values in items.items()})
    credit = _laid_end_to_end(c.credit for c in report.credits if report.values)
    metrics.largest("credit/turn_credit_max", credit)
    metrics.smallest("credit/turn_credit_min", credit)
    rewards = torch.tensor([r.reward for r in rollouts] if report.values else [])
    metrics.correlate("credit/value_outcome_correlation", items["value_last"], rewards)
    return metrics


def credit_items(rollouts: Sequence[Rollout], report: CreditReport) -> dict[str, Tensor]:
    """Return what is averaged of credit: how large it is and whence it comes.

    Items are those of sampled tokens (``advantage_abs``, ``trained_tokens``), of turns
    (``turn_reward_abs``) or of rollouts; none of values where the anchor needs no turn credit.
    """
    sampled = _laid_end_to_end(
        a.advantages[r.loss_mask] for r, a in zip(rollouts, report.advantages, strict=True)
    )
    return {
        "advantage_abs": sampled.abs(),
        "trained_tokens": sampled != 0,
        "outcome_abs": torch.tensor([abs(a.outcome_advantage) for a in report.advantages]),
        "turn_reward_abs": _laid_end_to_end(a.turn_rewards for a in report.advantages).abs(),
        # Groups that are all right or all wrong, as far as turn credit trains them at all.
        "equal_groups_trained": torch.tensor(
            [a.outcome_advantage == 0.0 and bool(a.advantages.any()) for a in report.advantages]
        ),
        "value_last": torch.tensor([float(v.values[-1]) for v in report.values]),
        "readiness_start": torch.tensor([float(v.mean_logprobs[0]) for v in report.values]),
        "readiness_end": torch.tensor([float(v.mean_logprobs[-1]) for v in report.values]),
    }


def reused(scorer: CachedScorer) -> Tensor:
    """Return for each score that was asked for whether it was known already."""
    return torch.arange(scorer.num_asked) >= scorer.num_scored


def _laid_end_to_end(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0), *parts])
