"""From rollouts to micro-batches: sized before credit exists, read only after it was assigned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from trace_pl.distributed.exchange import exchange
from trace_pl.distributed.leader import num_ranks, own_rank, to_all
from trace_pl.errors import CreditError, RolloutError
from trace_pl.training.minibatch import Minibatch, Row, collate
from trace_pl.training.row_plan import BatchPlan, RowPlan, RowSize, row_sizes
from trace_pl.types import Rollout, RolloutGroup, TokenAdvantages

T = TypeVar("T")


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
    """One epoch of experience: whole groups to assign credit to, and the rows to train on.

    With several ranks these are not the same rollouts: groups stay whole, rows are dealt so that
    every rank has as many tokens to train on as the others, see :meth:`share`. Groups whose
    rollouts were all lost say nothing and are left out.

    Args:
        groups: The rollouts of this rank.
        plan: How they become optimizer steps.
        epoch: Number of the epoch, for the order of the rows.
        policy_version: That of the policy which is about to train; None means the one that sampled.
        positions: Place of each group among those of all ranks; None means that they are all.
    """

    def __init__(
        self,
        groups: Sequence[RolloutGroup],
        plan: BatchPlan,
        epoch: int = 0,
        policy_version: int | None = None,
        positions: Sequence[int] | None = None,
    ) -> None:
        places = range(len(groups)) if positions is None else positions
        self.by_position = {p: g for p, g in zip(places, groups, strict=True) if g.rollouts}
        self.groups = tuple(self.by_position.values())
        self.plan = plan
        self.epoch = epoch
        self.policy_version = policy_version
        self.rollouts: tuple[Rollout, ...] = tuple(r for g in self.groups for r in g.rollouts)
        self.was_read = False
        """Whether training on it has begun."""
        self.old_logprobs: dict[str, Tensor] | None = None
        """(T,) log-probs of each row before the first step, in nats; None if it takes one."""
        self._advantages: dict[str, Tensor] | None = None
        self._rank = 0
        self._rows = {rollout.id: Row.of(rollout) for rollout in self.rollouts}
        self._plan_for(row_sizes(self.by_position), num_ranks=1)

    def _plan_for(self, sizes: Sequence[RowSize], num_ranks: int) -> None:
        self._num_rows = len(sizes)
        is_stale = self.policy_version is not None and any(
            size.policy_version != self.policy_version for size in sizes
        )
        self.is_on_policy = self.plan.takes_one_step and not is_stale
        """Whether every row is trained on by the very policy that sampled it."""
        self.row_plan = RowPlan.of(sizes, self.plan, self.epoch, num_ranks)

    def share(self) -> None:
        """Plan with the other ranks and exchange rows with them, when all come here.

        A row is a few numbers for each token, 13 bytes, and the recorded experts if there are any.
        """
        sizes = list(chain.from_iterable(to_all(row_sizes(self.by_position))))
        self._rank = own_rank()
        self._plan_for(sizes, num_ranks())
        self._rows = self._spread(self._rows)

    def _spread(self, found: Mapping[str, T]) -> dict[str, T]:
        """Send what is known of rows to the ranks that read them, and return what comes here."""
        wanted = [self.row_plan.rows_of(rank) for rank in range(self.row_plan.num_ranks)]
        parcels = [[item for item in found.items() if item[0] in ids] for ids in wanted]
        return dict(exchange(parcels))

    @property
    def micro_batches(self) -> int:
        """Forward passes of each optimizer step."""
        return self.row_plan.micro_batches

    def require_rollouts(self) -> None:
        """Refuse an epoch in which no rank has anything to train on.

        Raises:
            RolloutError: if that is so.
        """
        if not self._num_rows:
            raise RolloutError(
                "Expected at least one finished rollout in the epoch, got none: every rollout was "
                "lost to infrastructure failures. See the engine's and the tools' errors above."
            )

    def assign(self, advantages: Sequence[TokenAdvantages]) -> None:
        """Take the advantages of every rollout; the credit pipeline is the only caller.

        Ranks come here together, and each sends them to where the rows are.

        Raises:
            CreditError: if they are not one for each token of each rollout.
        """
        self._advantages = self._spread(advantages_by_id(self.rollouts, advantages))

    def forward_batches(self) -> Iterator[Minibatch]:
        """Yield every row of the first pass once, for forwards that need no credit."""
        zeros = {id_: torch.zeros(len(row.token_ids)) for id_, row in self._rows.items()}
        for step in range(self.plan.num_steps):
            for part in self.row_plan.forwards(step, self._rank):
                yield self._collate(part, zeros, (1.0, 1.0))

    def keep_old_logprobs(self, logprobs: Mapping[str, Tensor]) -> None:
        """Take what the policy says before the first step of the rows of :meth:`forward_batches`.

        Ranks come here together: another pass may read a row on another rank.

        Args:
            logprobs: (T,) or longer of each row, in nats; what lies behind its end is padding.
        """
        whole = {id_: values[: len(self._rows[id_].token_ids)] for id_, values in logprobs.items()}
        self.old_logprobs = self._spread({id_: values.clone() for id_, values in whole.items()})

    def __len__(self) -> int:
        """Return the number of micro-batches, fixed before the first is read."""
        return len(self.row_plan.steps) * self.micro_batches

    def __iter__(self) -> Iterator[Minibatch]:
        """Yield the micro-batches of all steps.

        Raises:
            CreditError: if credit was not assigned yet.
        """
        if self._advantages is None:
            raise CreditError("Expected advantages before the first minibatch, got none assigned.")
        self.was_read = True
        for step, totals in enumerate(self.row_plan.totals):
            for part in self.row_plan.forwards(step, self._rank):
                yield self._collate(part, self._advantages, totals)

    def _collate(
        self, part: Sequence[str], advantages: dict[str, Tensor], totals: tuple[float, float]
    ) -> Minibatch:
        return collate(
            [self._rows[id_] for id_ in part],
            advantages,
            self.old_logprobs,
            totals,
            token_limit=float(self.plan.token_limit),
            is_on_policy=self.is_on_policy,
        )
