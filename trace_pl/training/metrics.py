"""The metrics of an epoch: torchmetrics by tag, reduced over all ranks in one exchange."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from lightning import LightningModule
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric, Metric, MinMetric, PearsonCorrCoef, SumMetric

Gather = Callable[[Tensor], Tensor]
"""Given the (S,) tensor of this rank, returns the (ranks, S) tensor of all."""

ALONE = {"sync_on_compute": False}
"""Settings of a metric that leave the exchange between ranks to :class:`EpochMetrics`."""


class EpochMetrics:
    """Collects metrics by tag, and gives what they are over everything that all ranks saw.

    Metrics and their reductions are torchmetrics'. It would exchange each state of each metric by
    itself, after a barrier and an exchange of sizes; here all of them travel as one vector.

    Every rank has to name the same tags, also one without data. The states are float64 in main
    memory, outside of the module tree: in it, a plugin of half precision would cast them, since
    ``Module.to`` reaches the states that ``Metric.half`` protects.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add(self, tag: str, metric: Metric) -> Metric:
        """Take a metric, made with ``**ALONE``; one that returns several values gets a tag each."""
        self._metrics[tag] = metric.cpu().set_dtype(torch.float64)
        return metric

    def average(self, items: Mapping[str, Tensor]) -> None:
        """Add items to the mean of each tag; there may be none of them."""
        for tag, values in zip(items, _plain(*items.values()), strict=True):
            # The other strategies drop NaN, and the loss of a bad step should be seen.
            metric = self._metrics.get(tag) or self.add(tag, MeanMetric("disable", **ALONE))
            metric.update(values)

    def total(self, tag: str, number: float) -> None:
        """Add to the sum of a tag."""
        metric = self._metrics.get(tag) or self.add(tag, SumMetric("disable", **ALONE))
        metric.update(number)

    def largest(self, tag: str, values: Tensor) -> None:
        """Keep the largest item of a tag; there may be none of them."""
        metric = self._metrics.get(tag) or self.add(tag, MaxMetric("disable", **ALONE))
        metric.update(*_plain(values))

    def smallest(self, tag: str, values: Tensor) -> None:
        """Keep the smallest item of a tag; there may be none of them."""
        metric = self._metrics.get(tag) or self.add(tag, MinMetric("disable", **ALONE))
        metric.update(*_plain(values))

    def correlate(self, tag: str, first: Tensor, second: Tensor) -> None:
        """Add pairs to the correlation of a tag, which is not defined where a side is constant."""
        metric = self._metrics.get(tag) or self.add(tag, PearsonCorrCoef(**ALONE))
        if first.numel() > 0:
            metric.update(*_plain(first, second))

    def states(self) -> Tensor:
        """Return the (S,) states of all metrics of this rank."""
        states = [state.flatten() for state in self._states()]
        return torch.cat(states) if states else torch.zeros(0, dtype=torch.float64)

    def compute(self, gather: Gather | None = None) -> dict[str, float]:
        """Return each metric that is defined, and begin anew.

        Args:
            gather: The exchange of states, called once; None for a single rank.
        """
        found: dict[str, float] = {}
        if gather is not None and self._metrics:
            sizes = [state.numel() for state in self._states()]
            parts = iter(gather(self.states()).cpu().split(sizes, dim=1))
            for metric in self._metrics.values():
                _take(metric, parts)
        for tag, metric in self._metrics.items():
            found |= _values(tag, metric)
            metric.reset()
        return found

    def log(self, module: LightningModule) -> None:
        """Log each metric that is defined for the epoch, the same on every rank; begin anew."""
        strategy = module.trainer.strategy

        def gather(states: Tensor) -> Tensor:
            gathered = strategy.all_gather(states.to(strategy.root_device))
            assert isinstance(gathered, Tensor)
            return gathered

        found = self.compute(gather if module.trainer.world_size > 1 else None)
        for tag, value in found.items():
            module.log(tag, value, on_step=False, on_epoch=True, batch_size=1)

    def _states(self) -> Iterator[Tensor]:
        for metric in self._metrics.values():
            for state in metric.metric_state.values():
                assert isinstance(state, Tensor), "a list of all items would grow with the epoch"
                yield state


def _plain(*items: Tensor) -> Sequence[Tensor]:
    """Return floats or flags as float64 vectors in main memory.

    They travel as one: each copy from an accelerator would wait for all that it has to do.
    """
    if not items:
        return ()
    device = items[0].device
    together = torch.cat([values.detach().flatten().to(device) for values in items])
    # First to main memory: not every accelerator has float64.
    vector: Tensor = together.cpu().double()
    return torch.split(vector, [values.numel() for values in items])


def _take(metric: Metric, parts: Iterator[Tensor]) -> None:
    """Let a metric reduce the next parts, which are its states on all ranks."""

    def of_all_ranks(state: Tensor, group: object) -> list[Tensor]:
        return [row.view_as(state) for row in next(parts)]

    metric.sync(dist_sync_fn=of_all_ranks, distributed_available=lambda: True)


def _values(tag: str, metric: Metric) -> dict[str, float]:
    # A mean that is no number is that of its items, unless it has none.
    is_mean_of_some = isinstance(metric, MeanMetric) and bool(metric.weight > 0)
    with warnings.catch_warnings():
        # A rank without data takes part all the same, and an undefined correlation is no news.
        warnings.filterwarnings("ignore", "The (``compute`` method|variance of predictions)")
        computed = metric.compute()
    values = computed if isinstance(computed, Mapping) else {"": computed}
    named = {f"{tag}/{name}".rstrip("/"): float(value) for name, value in values.items()}
    return {name: v for name, v in named.items() if is_mean_of_some or math.isfinite(v)}
