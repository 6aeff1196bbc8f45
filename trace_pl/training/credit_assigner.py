"""The one place where the Trainer meets the credit pipeline."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from trace_pl.credit.pipeline import CreditPipeline, CreditReport
from trace_pl.errors import CreditError
from trace_pl.probes import ProbeRequest
from trace_pl.scoring import BranchedScorer, CachedScorer, ScoreStore
from trace_pl.training.credit_metrics import experience_metrics
from trace_pl.training.datamodule import data_module
from trace_pl.training.policy_module import PolicyModule
from trace_pl.training.run_folder import run_folder
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
        assert isinstance(pl_module, PolicyModule)
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
        """Close the store of the reference's scores."""
        if self._known is not None:
            self._known.close()
            self._known = None

    def on_train_epoch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Assign credit to the epoch's buffer."""
        assert self._pipeline is not None
        assert isinstance(pl_module, PolicyModule)
        data = data_module(trainer)
        buffer = data.buffer
        start = time.perf_counter()
        with torch.no_grad(), self._scorer(pl_module) as scorer:
            report = self._pipeline.run(buffer.groups, scorer, data.template)
        buffer.assign(report.advantages)
        metrics = experience_metrics(buffer.groups, report)
        metrics.average(
            {
                "credit/scores_reused": scorer.is_reused,
                "time/rollout_s": torch.tensor(data.rollout_seconds),
                "time/credit_s": torch.tensor(time.perf_counter() - start),
            }
        )
        if data.parity is not None:
            for tag, nats in data.parity.by_tag().items():
                metrics.largest(tag, torch.tensor(nats))
        metrics.log(pl_module)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, CreditObserver):
                callback.observe(buffer.groups, report, trainer)

    @contextmanager
    def _scorer(self, module: PolicyModule) -> Iterator[CachedScorer]:
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
    """The scorer of a run in which no stage reads a model."""

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
