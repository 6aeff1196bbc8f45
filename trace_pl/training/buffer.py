"""From rollouts to micro-batches: sized before credit exists, read only after it was assigned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from trace_pl.errors import ConfigError, CreditError, RolloutError
from trace_pl.models.packing import balanced_bins, bins_within
from trace_pl.training.minibatch import Minibatch, collate
from trace_pl.types import Rollout, RolloutGroup, TokenAdvantages

Reduce = Callable[[Tensor, str], Tensor]
"""Gives the "sum" or the "max" of a tensor over all ranks."""


@dataclass(frozen=True)
class BatchPlan:
    """How one epoch's rollouts become optimizer steps.

    Args:
        num_steps: Optimizer steps per pass over the rollouts.
        num_passes: Passes over the same rollouts.
        tokens_per_forward: Most tokens of one forward and backward pass, which bounds its memory; a
            longer rollout goes alone.
        seed: Shuffles rows, with the epoch's number.
        token_limit: Most tokens of a rollout; a loss may divide by it.

    Raises:
        ConfigError: if a number is below 1.
    """

    num_steps: int = 1
    num_passes: int = 1
    tokens_per_forward: int = 16_384
    seed: int = 0
    token_limit: int = 49_152

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_passes", "tokens_per_forward"):
            if getattr(self, name) < 1:
                raise ConfigError(f"Expected data.{name} of at least 1, got {getattr(self, name)}.")

    @property
    def takes_one_step(self) -> bool:
        """Whether the policy that trains on a row is the one that began the epoch."""
        return self.num_steps * self.num_passes == 1


def optimizer_steps(
    rollouts: Sequence[Rollout], plan: BatchPlan, epoch: int
) -> Iterator[list[Rollout]]:
    """Yield the rollouts of each optimizer step, reshuffled for each pass."""
    for number in range(plan.num_passes):
        seed = hash((plan.seed, epoch, number))
        order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(seed))
        for rows in order.tensor_split(plan.num_steps):
            yield [rollouts[i] for i in rows.tolist()]


@dataclass(frozen=True, eq=False)
class Sizes:
    """How many forward passes an epoch takes; every rank has to take as many."""

    micro_batches: int
    """Forward passes of each optimizer step: as many as the largest of them needs."""
    num_forwards: int
    """Forward passes that read every rollout once."""
    totals_S2: Tensor
    """Tokens with loss, and rollouts that have any, of each optimizer step."""

    @classmethod
    def of_steps(cls, steps: Sequence[Sequence[Rollout]], num_forwards: int, budget: int) -> Sizes:
        """Return the sizes of this rank's steps, for forwards of at most ``budget`` tokens."""
        needed = [len(bins_within(lengths(step), budget)) for step in steps]
        return cls(max(1, *needed), num_forwards, torch.tensor([_totals(step) for step in steps]))

    def agreed(self, reduce: Reduce, world_size: int) -> Sizes:
        """Return what all ranks agree on, so that their mean gradient is that of one big batch.

        Gradients and logged shares are averaged over the ranks, so the totals are means as well.
        """
        counts = reduce(torch.tensor([self.micro_batches, self.num_forwards]), "max")
        micro_batches, num_forwards = counts.tolist()
        return Sizes(micro_batches, num_forwards, reduce(self.totals_S2, "sum") / world_size)


def advantages_by_id(
    rollouts: Sequence[Rollout], advantages: Sequence[TokenAdvantages]
) -> dict[str, Tensor]:
    """Return the (T,) advantages of each rollout.

    Raises:
        CreditError: if a rollout is missing, named twice, or has the wrong length.
    """
    by_id = {item.rollout_id: item.advantages for item in advantages}
    expected = {r.id: len(r.token_ids) for r in rollouts}
    got = {id_: len(values) for id_, values in by_id.items()}
    if len(by_id) != len(advantages) or expected != got:
        wrong = sorted(k for k in expected.keys() | got.keys() if expected.get(k) != got.get(k))
        raise CreditError(
            f"Expected one advantage per token of each of {len(expected)} rollouts, got a "
            f"mismatch in {wrong[:3]}. Does the anchor return one result for every rollout?"
        )
    return by_id


class RolloutBuffer(IterableDataset[Minibatch]):
    """One epoch of experience.

    Groups whose rollouts were all lost say nothing and are left out; a rank may have none while
    others have some.

    Args:
        groups: The rollouts.
        plan: How they become optimizer steps.
        epoch: Number of the epoch, for the order of the rows.
        policy_version: That of the policy which is about to train; None means the one that sampled.
    """

    def __init__(
        self,
        groups: Sequence[RolloutGroup],
        plan: BatchPlan,
        epoch: int = 0,
        policy_version: int | None = None,
    ) -> None:
        self.groups = tuple(group for group in groups if group.rollouts)
        self.plan = plan
        self.rollouts: tuple[Rollout, ...] = tuple(r for g in groups for r in g.rollouts)
        sampled_by = {r.policy_version for r in self.rollouts}
        is_stale = policy_version is not None and bool(sampled_by - {policy_version})
        self.is_on_policy = plan.takes_one_step and not is_stale
        """Whether every row is trained on by the very policy that sampled it."""
        self.was_read = False
        """Whether training on it has begun."""
        self.old_logprobs: dict[str, Tensor] | None = None
        """(T,) log-probs of each rollout before the first step, in nats; None if it takes one."""
        self._advantages: dict[str, Tensor] | None = None
        self._steps = list(optimizer_steps(self.rollouts, plan, epoch))
        self._forwards = bins_within(lengths(self.rollouts), plan.tokens_per_forward)
        self.sizes = Sizes.of_steps(self._steps, len(self._forwards), plan.tokens_per_forward)

    @property
    def micro_batches(self) -> int:
        """Forward passes of each optimizer step."""
        return self.sizes.micro_batches

    def share(self, reduce: Reduce, world_size: int) -> None:
        """Agree on sizes with the other ranks; see :meth:`Sizes.agreed`."""
        self.sizes = self.sizes.agreed(reduce, world_size)

    def require_rollouts(self) -> None:
        """Refuse an epoch in which no rank has anything to train on.

        Raises:
            RolloutError: if that is so.
        """
        if not self.rollouts and not bool(self.sizes.totals_S2.any()):
            raise RolloutError(
                "Expected at least one finished rollout in the epoch, got none: every rollout was "
                "lost to infrastructure failures. See the engine's and the tools' errors above."
            )

    def assign(self, advantages: Sequence[TokenAdvantages]) -> None:
        """Take the advantages of every rollout; the credit pipeline is the only caller.

        Raises:
            CreditError: if they are not one for each token of each rollout.
        """
        self._advantages = advantages_by_id(self.rollouts, advantages)

    def forward_batches(self) -> Iterator[Minibatch]:
        """Yield every rollout once, for forwards that need no credit."""
        zeros = {r.id: torch.zeros(len(r.token_ids)) for r in self.rollouts}
        missing = self.sizes.num_forwards - len(self._forwards)
        for part in [*self._forwards, *([[]] * missing)]:
            yield self._collate([self.rollouts[i] for i in part], zeros, (1.0, 1.0))

    def __len__(self) -> int:
        """Return the number of micro-batches, fixed before the first is read."""
        return len(self._steps) * self.micro_batches

    def __iter__(self) -> Iterator[Minibatch]:
        """Yield the micro-batches of all steps.

        Raises:
            CreditError: if credit was not assigned yet.
        """
        if self._advantages is None:
            raise CreditError("Expected advantages before the first minibatch, got none assigned.")
        self.was_read = True
        for step, totals in zip(self._steps, self.sizes.totals_S2.tolist(), strict=True):
            for part in balanced_bins(lengths(step), self.micro_batches):
                yield self._collate([step[i] for i in part], self._advantages, totals)

    def _collate(
        self, part: Sequence[Rollout], advantages: dict[str, Tensor], totals: tuple[float, float]
    ) -> Minibatch:
        return collate(
            part,
            advantages,
            self.old_logprobs,
            totals,
            token_limit=float(self.plan.token_limit),
            is_on_policy=self.is_on_policy,
        )


def lengths(rollouts: Sequence[Rollout]) -> list[int]:
    """Return the tokens of each rollout."""
    return [len(r.token_ids) for r in rollouts]


def _totals(rollouts: Sequence[Rollout]) -> tuple[float, float]:
    """Return the sampled tokens, and the rollouts that have any."""
    num_tokens = [int(r.loss_mask.sum()) for r in rollouts]
    return float(sum(num_tokens)), float(sum(map(bool, num_tokens)))
