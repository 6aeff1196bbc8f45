"""Batches as the Trainer hands them on: rows of one forward, and groups that are only looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset

from trace_pl.types import Rollout, RolloutGroup


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """What training reads of a rollout; texts, turns and rewards have become advantages."""

    id: str
    token_ids: Tensor
    """(T,) int64."""
    loss_mask: Tensor
    """(T,) bool."""
    logprobs: Tensor
    """(T,) float32 of the sampler, in nats."""
    experts: Tensor | None
    """(T, N layers, K) int16, or None."""

    @classmethod
    def of(cls, rollout: Rollout) -> Row:
        """Return the row of a rollout."""
        return cls(
            rollout.id, rollout.token_ids, rollout.loss_mask, rollout.logprobs, rollout.experts
        )


class Minibatch:
    """Rows of one forward pass. They are right-padded here; the model reads them without padding.

    A plain class with its own ``to``: Lightning casts the floats of dataclass batches to the
    training precision, and advantages must stay float32.
    """

    def __init__(
        self,
        *,
        rollout_ids: Sequence[str],
        token_ids_BT: Tensor,
        mask_BT: Tensor,
        advantages_BT: Tensor,
        old_logprobs_BT: Tensor | None,
        sampler_logprobs_BT: Tensor,
        num_loss_tokens: float,
        num_rollouts: float,
        token_limit: float,
        is_on_policy: bool,
        experts_BTNK: Tensor | None,
    ) -> None:
        """Hold the tensors.

        Args:
            rollout_ids: One for each row; none for a row that stands in for missing work.
            token_ids_BT: (B, T) int64.
            mask_BT: (B, T) bool, true on sampled tokens.
            advantages_BT: (B, T) float32.
            old_logprobs_BT: (B, T) in nats; None means those of the current policy, detached.
            sampler_logprobs_BT: (B, T) in nats, as the engine gave them.
            num_loss_tokens: Tokens with loss in the whole optimizer step, over all ranks, per rank.
            num_rollouts: Rollouts with such tokens, likewise.
            token_limit: Most tokens that a rollout may have.
            is_on_policy: Whether the policy that trains is the one that sampled.
            experts_BTNK: (B, T, N layers, K) the sampler's experts, -1 where unknown, or None.
        """
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
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=non_blocking)
            if isinstance(value, Tensor)
            else value
            for name, value in vars(self).items()
        }
        return Minibatch(**moved)


def collate(
    given: Sequence[Row],
    advantages: Mapping[str, Tensor],
    old_logprobs: Mapping[str, Tensor] | None,
    totals: tuple[float, float],
    token_limit: float,
    is_on_policy: bool,
) -> Minibatch:
    """Return the rows of a forward pass.

    Without any it is one row of two tokens without loss, where a step has fewer rows than
    forward passes.

    Args:
        given: At most as many as fit.
        advantages: (T,) of each row by its id.
        old_logprobs: (T,) of each row in nats; None means those of the current policy.
        totals: Tokens with loss and rollouts that have any, of the whole optimizer step.
        token_limit: Most tokens that a rollout may have.
        is_on_policy: Whether the policy that trains is the one that sampled.
    """
    zeros = torch.zeros(1, 2)

    def rows(tensors: Iterable[Tensor], empty: Tensor = zeros) -> Tensor:
        return pad_sequence(list(tensors), batch_first=True) if given else empty

    return Minibatch(
        rollout_ids=[r.id for r in given],
        token_ids_BT=rows((r.token_ids for r in given), zeros.long()),
        mask_BT=rows((r.loss_mask for r in given), zeros.bool()),
        advantages_BT=rows(advantages[r.id] for r in given),
        old_logprobs_BT=None if old_logprobs is None else rows(old_logprobs[r.id] for r in given),
        sampler_logprobs_BT=rows(r.logprobs for r in given),
        num_loss_tokens=totals[0] or 1.0,
        num_rollouts=totals[1] or 1.0,
        token_limit=token_limit,
        is_on_policy=is_on_policy,
        experts_BTNK=_experts(given),
    )


def _experts(given: Sequence[Row]) -> Tensor | None:
    experts = [row.experts for row in given if row.experts is not None]
    if not experts or len(experts) < len(given):
        return None
    return pad_sequence(experts, batch_first=True, padding_value=-1)


class EvaluationBatch:
    """Groups that are looked at and not trained on, in order of their questions.

    Ranks share the questions of a split, and which of them a rank has asked depends on the clock.

    A plain class without ``to``: Lightning takes collections and dataclasses apart, to cast their
    tensors to the training precision and to move them, which frozen ones refuse.
    """

    def __init__(self, groups: Mapping[int, RolloutGroup]) -> None:
        """Hold the groups by position of their question; one that lost its rollouts is empty."""
        self.positions = tuple(groups)
        self.groups = tuple(groups.values())


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
