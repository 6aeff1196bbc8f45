"""From rollouts to micro-batches: a sized buffer that is read lazily, after credit was assigned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset

from trace_pl.errors import CreditError, RolloutError
from trace_pl.packing import balanced_bins, bins_within
from trace_pl.types import Rollout, RolloutGroup, TokenAdvantages

Reduce = Callable[[Tensor, str], Tensor]


class Minibatch:
    """Rows of one forward pass. They are right-padded here; the model reads them without padding.

    A plain class with its own ``to``: Lightning casts the floats of dataclass batches to the
    training precision, and advantages must stay float32.
    """

    def __init__(
        self,
        rollout_ids: Sequence[str],
        token_ids_BT: Tensor,
        mask_BT: Tensor,
        advantages_BT: Tensor,
        old_logprobs_BT: Tensor | None,
        sampler_logprobs_BT: Tensor,
        num_loss_tokens: float,
        num_rollouts: float,
    ) -> None:
        """Hold the tensors; ``old_logprobs_BT`` None means "the current policy, detached"."""
        self.rollout_ids = tuple(rollout_ids)
        self.token_ids_BT = token_ids_BT
        self.mask_BT = mask_BT
        self.advantages_BT = advantages_BT
        self.old_logprobs_BT = old_logprobs_BT
        self.sampler_logprobs_BT = sampler_logprobs_BT
        self.num_loss_tokens = num_loss_tokens
        self.num_rollouts = num_rollouts

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Minibatch:
        """Return a copy on ``device``, every dtype kept."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        old = self.old_logprobs_BT
        return Minibatch(
            self.rollout_ids,
            move(self.token_ids_BT),
            move(self.mask_BT),
            move(self.advantages_BT),
            None if old is None else move(old),
            move(self.sampler_logprobs_BT),
            self.num_loss_tokens,
            self.num_rollouts,
        )


@dataclass(frozen=True)
class BatchPlan:
    """How one epoch's rollouts become optimizer steps.

    Args:
        num_steps: Optimizer steps per pass over the rollouts.
        num_passes: Passes over the same rollouts.
        tokens_per_forward: Most tokens of one forward and backward pass, which bounds its memory; a
            longer rollout goes alone.
        seed: Shuffles rows, with the epoch's number.
    """

    num_steps: int = 1
    num_passes: int = 1
    tokens_per_forward: int = 16_384
    seed: int = 0

    @property
    def is_on_policy(self) -> bool:
        """Whether every row is trained on by the very policy that sampled it."""
        return self.num_steps * self.num_passes == 1


class RolloutBuffer(IterableDataset[Minibatch]):
    """One epoch of experience, sized before credit exists and read only after it was assigned."""

    def __init__(self, groups: Sequence[RolloutGroup], plan: BatchPlan, epoch: int = 0) -> None:
        """Hold finished groups; one whose rollouts were all lost says nothing and is left out.

        Raises:
            RolloutError: if no group holds a rollout.
        """
        self.groups = tuple(group for group in groups if group.rollouts)
        self.plan = plan
        self.epoch = epoch
        self.rollouts: tuple[Rollout, ...] = tuple(r for g in groups for r in g.rollouts)
        self.was_read = False
        """Whether training on it has begun."""
        self._advantages: dict[str, Tensor] | None = None
        self.old_logprobs: dict[str, Tensor] | None = None
        if not self.rollouts:
            raise RolloutError(
                "Expected at least one finished rollout in the epoch, got none: every rollout was "
                "lost to infrastructure failures. See the engine's and the tools' errors above."
            )
        steps = list(self._steps())
        self.micro_batches = max(
            len(bins_within(_lengths(step), plan.tokens_per_forward)) for step in steps
        )
        """Forward passes of each optimizer step: as many as the largest of them needs."""
        self._totals_S2 = torch.tensor([_totals(step) for step in steps])

    def share(self, reduce: Reduce, world_size: int) -> None:
        """Agree with the other ranks, so that their mean gradient is that of one big batch.

        Args:
            reduce: Gives the "sum" or the "max" of a tensor over all ranks.
            world_size: Number of ranks.
        """
        self.micro_batches = int(reduce(torch.tensor(self.micro_batches), "max"))
        # Gradients and logged shares are averaged over the ranks.
        self._totals_S2 = reduce(self._totals_S2, "sum") / world_size

    def assign(self, advantages: Sequence[TokenAdvantages]) -> None:
        """Take the advantages of every rollout; the credit pipeline is the only caller.

        Raises:
            CreditError: if a rollout is missing, named twice, or has the wrong length.
        """
        by_id = {item.rollout_id: item.advantages for item in advantages}
        expected = {r.id: len(r.token_ids) for r in self.rollouts}
        got = {id_: len(values) for id_, values in by_id.items()}
        if len(by_id) != len(advantages) or expected != got:
            wrong = sorted(k for k in expected.keys() | got.keys() if expected.get(k) != got.get(k))
            raise CreditError(
                f"Expected one advantage per token of each of {len(expected)} rollouts, got a "
                f"mismatch in {wrong[:3]}. Does the anchor return one result for every rollout?"
            )
        self._advantages = by_id

    def forward_batches(self) -> Iterator[Minibatch]:
        """Yield every rollout once, for forwards that need no credit."""
        lengths = _lengths(self.rollouts)
        for part in bins_within(lengths, self.plan.tokens_per_forward):
            yield self._collate([self.rollouts[i] for i in part], 1.0, 1.0)

    def __len__(self) -> int:
        """Return the number of micro-batches, fixed at construction."""
        return self.plan.num_steps * self.plan.num_passes * self.micro_batches

    def __iter__(self) -> Iterator[Minibatch]:
        """Yield the micro-batches of all passes, rows reshuffled for each pass.

        Raises:
            CreditError: if credit was not assigned yet.
        """
        if self._advantages is None:
            raise CreditError("Expected advantages before the first minibatch, got none assigned.")
        self.was_read = True
        for rollouts, totals in zip(self._steps(), self._totals_S2.tolist(), strict=True):
            for part in balanced_bins(_lengths(rollouts), self.micro_batches):
                yield self._collate([rollouts[i] for i in part], *totals)

    def _steps(self) -> Iterator[list[Rollout]]:
        """Yield the rollouts of each optimizer step."""
        for number in range(self.plan.num_passes):
            seed = hash((self.plan.seed, self.epoch, number))
            order = torch.randperm(
                len(self.rollouts), generator=torch.Generator().manual_seed(seed)
            )
            for rows in order.tensor_split(self.plan.num_steps):
                yield [self.rollouts[i] for i in rows.tolist()]

    def _collate(
        self, part: Sequence[Rollout], num_tokens: float, num_rollouts: float
    ) -> Minibatch:
        empty = not part
        # A step with fewer rows than micro-batches is filled up with rows of zero weight.
        rows = part or [self.rollouts[0]]
        mask = _pad([r.loss_mask & (not empty) for r in rows])
        old = None
        if self.old_logprobs is not None:
            old = _pad([self.old_logprobs[r.id] for r in rows])
        return Minibatch(
            rollout_ids=[r.id for r in rows],
            token_ids_BT=_pad([r.token_ids for r in rows]),
            mask_BT=mask,
            advantages_BT=_pad([self._advantage(r) for r in rows]),
            old_logprobs_BT=old,
            sampler_logprobs_BT=_pad([r.logprobs for r in rows]),
            num_loss_tokens=num_tokens or 1.0,
            num_rollouts=num_rollouts or 1.0,
        )

    def _advantage(self, rollout: Rollout) -> Tensor:
        if self._advantages is None:
            return torch.zeros(len(rollout.token_ids))
        return self._advantages[rollout.id]


def _totals(rollouts: Sequence[Rollout]) -> tuple[float, float]:
    """Return the sampled tokens, and the rollouts that have any."""
    num_tokens = [int(r.loss_mask.sum()) for r in rollouts]
    return float(sum(num_tokens)), float(sum(map(bool, num_tokens)))


def _lengths(rollouts: Sequence[Rollout]) -> list[int]:
    return [len(r.token_ids) for r in rollouts]


def _pad(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True)
