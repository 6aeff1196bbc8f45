"""From rollouts to micro-batches: a sized buffer that is read lazily, after credit was assigned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset

from trace_pl.errors import CreditError, RolloutError
from trace_pl.models.packing import balanced_bins, bins_within
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
        is_on_policy: bool = True,
        experts_BTNK: Tensor | None = None,
        token_limit: float = 1.0,
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
        self.is_on_policy = is_on_policy
        self.experts_BTNK = experts_BTNK
        self.token_limit = token_limit

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Minibatch:
        """Return a copy on ``device``, every dtype kept."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        old, experts = self.old_logprobs_BT, self.experts_BTNK
        return Minibatch(
            self.rollout_ids,
            move(self.token_ids_BT),
            move(self.mask_BT),
            move(self.advantages_BT),
            None if old is None else move(old),
            move(self.sampler_logprobs_BT),
            self.num_loss_tokens,
            self.num_rollouts,
            self.is_on_policy,
            None if experts is None else move(experts),
            self.token_limit,
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
        token_limit: Most tokens of a rollout; a loss may divide by it.
    """

    num_steps: int = 1
    num_passes: int = 1
    tokens_per_forward: int = 16_384
    seed: int = 0
    token_limit: int = 49_152

    @property
    def takes_one_step(self) -> bool:
        """Whether the policy that trains on a row is the one that began the epoch."""
        return self.num_steps * self.num_passes == 1


class RolloutBuffer(IterableDataset[Minibatch]):
    """One epoch of experience, sized before credit exists and read only after it was assigned."""

    def __init__(
        self,
        groups: Sequence[RolloutGroup],
        plan: BatchPlan,
        epoch: int = 0,
        policy_version: int | None = None,
    ) -> None:
        """Hold finished groups; one whose rollouts were all lost says nothing and is left out.

        A rank may have none while others have some.

        Args:
            groups: The rollouts.
            plan: How they become optimizer steps.
            epoch: Number of the epoch, for the order of the rows.
            policy_version: That of the policy which is about to train; None means the one that
                sampled.
        """
        self.groups = tuple(group for group in groups if group.rollouts)
        self.plan = plan
        self.epoch = epoch
        self.rollouts: tuple[Rollout, ...] = tuple(r for g in groups for r in g.rollouts)
        versions = {r.policy_version for r in self.rollouts}
        is_stale = policy_version is not None and bool(versions - {policy_version})
        self.is_on_policy = plan.takes_one_step and not is_stale
        """Whether every row is trained on by the very policy that sampled it."""
        self.was_read = False
        """Whether training on it has begun."""
        self._advantages: dict[str, Tensor] | None = None
        self.old_logprobs: dict[str, Tensor] | None = None
        steps = list(self._steps())
        self.micro_batches = max(
            1, *(len(bins_within(_lengths(step), plan.tokens_per_forward)) for step in steps)
        )
        """Forward passes of each optimizer step: as many as the largest of them needs."""
        self.num_forwards = len(self._forward_bins())
        """Forward passes that read every rollout once."""
        self._totals_S2 = torch.tensor([_totals(step) for step in steps])
        """Tokens with loss, and rollouts that have any, of each optimizer step."""

    def require_rollouts(self) -> None:
        """Refuse an epoch in which no rank has anything to train on.

        Raises:
            RolloutError: if that is so.
        """
        if not self.rollouts and not bool(self._totals_S2.any()):
            raise RolloutError(
                "Expected at least one finished rollout in the epoch, got none: every rollout was "
                "lost to infrastructure failures. See the engine's and the tools' errors above."
            )

    def share(self, reduce: Reduce, world_size: int) -> None:
        """Agree with the other ranks, so that their mean gradient is that of one big batch.

        Args:
            reduce: Gives the "sum" or the "max" of a tensor over all ranks.
            world_size: Number of ranks.
        """
        counts = reduce(torch.tensor([self.micro_batches, self.num_forwards]), "max")
        self.micro_batches, self.num_forwards = counts.tolist()
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
        bins = self._forward_bins()
        for part in [*bins, *([[]] * (self.num_forwards - len(bins)))]:
            yield self._collate([self.rollouts[i] for i in part], 1.0, 1.0)

    def _forward_bins(self) -> list[list[int]]:
        return bins_within(_lengths(self.rollouts), self.plan.tokens_per_forward)

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
        if not part:
            return _nothing(self.old_logprobs is not None, num_tokens, num_rollouts)
        old = None
        if self.old_logprobs is not None:
            old = _pad([self.old_logprobs[r.id] for r in part])
        return Minibatch(
            rollout_ids=[r.id for r in part],
            token_ids_BT=_pad([r.token_ids for r in part]),
            mask_BT=_pad([r.loss_mask for r in part]),
            advantages_BT=_pad([self._advantage(r) for r in part]),
            old_logprobs_BT=old,
            sampler_logprobs_BT=_pad([r.logprobs for r in part]),
            num_loss_tokens=num_tokens or 1.0,
            num_rollouts=num_rollouts or 1.0,
            is_on_policy=self.is_on_policy,
            experts_BTNK=_pad_experts(part),
            token_limit=float(self.plan.token_limit),
        )

    def _advantage(self, rollout: Rollout) -> Tensor:
        if self._advantages is None:
            return torch.zeros(len(rollout.token_ids))
        return self._advantages[rollout.id]


def _nothing(has_old_logprobs: bool, num_tokens: float, num_rollouts: float) -> Minibatch:
    """Return two tokens without loss, where a step has fewer rows than forward passes."""
    zeros = torch.zeros(1, 2)
    return Minibatch(
        rollout_ids=[],
        token_ids_BT=zeros.long(),
        mask_BT=zeros.bool(),
        advantages_BT=zeros,
        old_logprobs_BT=zeros if has_old_logprobs else None,
        sampler_logprobs_BT=zeros,
        num_loss_tokens=num_tokens or 1.0,
        num_rollouts=num_rollouts or 1.0,
    )


def _totals(rollouts: Sequence[Rollout]) -> tuple[float, float]:
    """Return the sampled tokens, and the rollouts that have any."""
    num_tokens = [int(r.loss_mask.sum()) for r in rollouts]
    return float(sum(num_tokens)), float(sum(map(bool, num_tokens)))


def _lengths(rollouts: Sequence[Rollout]) -> list[int]:
    return [len(r.token_ids) for r in rollouts]


class EvaluationBatch:
    """Groups that are looked at and not trained on, one for each question in order.

    A plain class without ``to``: Lightning takes collections and dataclasses apart, to cast their
    tensors to the training precision and to move them, which frozen ones refuse.
    """

    def __init__(self, groups: Iterable[RolloutGroup]) -> None:
        """Hold the groups; one whose rollouts were all lost is empty."""
        self.groups = tuple(groups)


class OneBatch(IterableDataset[EvaluationBatch]):
    """One batch that is made when it is read; sized, so nothing is prefetched."""

    def __init__(self, make: Callable[[], EvaluationBatch]) -> None:
        """Remember how to make it."""
        self.make = make

    def __len__(self) -> int:
        """Return 1."""
        return 1

    def __iter__(self) -> Iterator[EvaluationBatch]:
        """Make and yield the batch."""
        yield self.make()


def _pad_experts(rollouts: Sequence[Rollout]) -> Tensor | None:
    rows = [r.experts for r in rollouts if r.experts is not None]
    if len(rows) < len(rollouts):
        return None
    return pad_sequence(rows, batch_first=True, padding_value=-1)


def _pad(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True)
