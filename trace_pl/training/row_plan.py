"""Which rank trains on which rows in which forward, planned alike on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from trace_pl.distributed.exchange import exchange
from trace_pl.distributed.leader import num_ranks, to_all
from trace_pl.errors import ConfigError
from trace_pl.models.packing import balanced_bins, bins_within
from trace_pl.types import RolloutGroup


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


@dataclass(frozen=True, slots=True, order=True)
class RowSize:
    """What a plan has to know of a rollout, wherever it is."""

    position: int
    """Place of its question in the epoch; with ``index`` it orders rows alike on every rank."""
    index: int
    id: str
    num_tokens: int
    num_loss_tokens: int
    policy_version: int


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The forwards of an epoch on all ranks.

    All ranks make equally many forwards, for a sharded model gathers its weights from all of them,
    and of about equal size. None is empty as long as a step has as many rows as there are forwards.
    """

    steps: tuple[tuple[tuple[str, ...], ...], ...]
    """For each optimizer step its forwards by ids of their rows: forward n is the (n div ranks)-th
    of rank n mod ranks."""
    totals: tuple[tuple[float, float], ...]
    """Tokens with loss, and rollouts that have any, of each optimizer step and per rank: gradients
    and logged shares are averaged over the ranks, so that they become those of one big batch."""
    steps_per_pass: int
    num_ranks: int

    @classmethod
    def of(cls, sizes: Sequence[RowSize], plan: BatchPlan, epoch: int, num_ranks: int) -> RowPlan:
        """Deal the rows of all ranks to optimizer steps, and those of a step to forwards."""
        rows = sorted(sizes)
        steps = [[rows[i] for i in step] for step in optimizer_steps(len(rows), plan, epoch)]
        budget = plan.tokens_per_forward
        needed = [len(bins_within(_lengths(step), budget, num_ranks)) for step in steps]
        num_forwards = -(-max(1, *needed) // num_ranks) * num_ranks
        return cls(
            tuple(
                tuple(tuple(row.id for row in part) for part in _forwards(step, num_forwards))
                for step in steps
            ),
            tuple(_totals(step, num_ranks) for step in steps),
            plan.num_steps,
            num_ranks,
        )

    @property
    def micro_batches(self) -> int:
        """Forwards of each optimizer step on a rank: as many as the largest step needs."""
        return len(self.steps[0]) // self.num_ranks

    def forwards(self, step: int, rank: int) -> tuple[tuple[str, ...], ...]:
        """Return the forwards of a rank in a step, each by ids of rows."""
        return self.steps[step][rank :: self.num_ranks]

    def rows_of(self, rank: int) -> set[str]:
        """Return the ids of all rows that a rank reads."""
        forwards = (self.forwards(step, rank) for step in range(len(self.steps)))
        return {id_ for each in forwards for id_ in chain.from_iterable(each)}


def optimizer_steps(num_rows: int, plan: BatchPlan, epoch: int) -> Iterator[list[int]]:
    """Yield the rows of each optimizer step by their numbers, reshuffled for each pass."""
    for number in range(plan.num_passes):
        seed = hash((plan.seed, epoch, number))
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
        for rows in order.tensor_split(plan.num_steps):
            yield rows.tolist()


def deal_groups(
    groups: Mapping[int, RolloutGroup],
) -> tuple[dict[int, RolloutGroup], list[int]]:
    """Move whole groups between ranks until all have about as many tokens to assign credit to.

    Who sampled a group depends on the clock; who has it afterwards on the groups alone, so that a
    run can be repeated bit by bit.

    Args:
        groups: What this rank sampled, by position of the question in the epoch.

    Returns:
        The groups of this rank in order of position, and the positions of all ranks' groups.
    """
    mine = [(position, _tokens(group)) for position, group in groups.items()]
    sizes = dict(sorted(chain.from_iterable(to_all(mine))))
    positions = list(sizes)
    parcels = [
        [(positions[i], groups[positions[i]]) for i in part if positions[i] in groups]
        for part in balanced_bins(list(sizes.values()), num_ranks())
    ]
    dealt = sorted(exchange(parcels), key=lambda item: item[0])
    return dict(dealt), positions


def row_sizes(groups: Mapping[int, RolloutGroup]) -> list[RowSize]:
    """Return what a plan has to know of the rollouts of this rank."""
    return [
        RowSize(position, r.index, r.id, len(r.token_ids), int(r.loss_mask.sum()), r.policy_version)
        for position, group in groups.items()
        for r in group.rollouts
    ]


def _tokens(group: RolloutGroup) -> int:
    return sum(len(rollout.token_ids) for rollout in group.rollouts)


def _forwards(step: Sequence[RowSize], count: int) -> list[list[RowSize]]:
    """Deal the rows of a step to forwards, the largest first: those of one moment are alike."""
    dealt = [[step[i] for i in part] for part in balanced_bins(_lengths(step), count)]
    return sorted(dealt, key=lambda part: -sum(_lengths(part)))


def _lengths(rows: Sequence[RowSize]) -> list[int]:
    return [row.num_tokens for row in rows]


def _totals(rows: Sequence[RowSize], num_ranks: int) -> tuple[float, float]:
    """Return the sampled tokens, and the rollouts that have any, per rank."""
    num_tokens = [row.num_loss_tokens for row in rows]
    return sum(num_tokens) / num_ranks, sum(map(bool, num_tokens)) / num_ranks
