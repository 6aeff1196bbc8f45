"""Batches as the Trainer hands them on: rows of one forward, and groups that are only looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset

from trace_pl.types import Rollout, RolloutGroup


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
    rollouts: Sequence[Rollout],
    advantages: Mapping[str, Tensor],
    old_logprobs: Mapping[str, Tensor] | None,
    totals: tuple[float, float],
    token_limit: float,
    is_on_policy: bool,
) -> Minibatch:
    """Return the rows of a forward pass.

    Without rollouts it is one row of two tokens without loss, where a step has fewer rows than
    forward passes.

    Args:
        rollouts: At most as many as fit.
        advantages: (T,) of each rollout by its id.
        old_logprobs: (T,) of each rollout in nats; None means those of the current policy.
        totals: Tokens with loss and rollouts that have any, of the whole optimizer step.
        token_limit: Most tokens that a rollout may have.
        is_on_policy: Whether the policy that trains is the one that sampled.
    """
    zeros = torch.zeros(1, 2)

    def rows(tensors: Iterable[Tensor], empty: Tensor = zeros) -> Tensor:
        return pad_sequence(list(tensors), batch_first=True) if rollouts else empty

    return Minibatch(
        rollout_ids=[r.id for r in rollouts],
        token_ids_BT=rows((r.token_ids for r in rollouts), zeros.long()),
        mask_BT=rows((r.loss_mask for r in rollouts), zeros.bool()),
        advantages_BT=rows(advantages[r.id] for r in rollouts),
        old_logprobs_BT=None
        if old_logprobs is None
        else rows(old_logprobs[r.id] for r in rollouts),
        sampler_logprobs_BT=rows(r.logprobs for r in rollouts),
        num_loss_tokens=totals[0] or 1.0,
        num_rollouts=totals[1] or 1.0,
        token_limit=token_limit,
        is_on_policy=is_on_policy,
        experts_BTNK=_experts(rollouts),
    )


def _experts(rollouts: Sequence[Rollout]) -> Tensor | None:
    rows = [r.experts for r in rollouts if r.experts is not None]
    if not rows or len(rows) < len(rollouts):
        return None
    return pad_sequence(rows, batch_first=True, padding_value=-1)


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
