"""What one rank does for all of them, such as talking to a server that they share."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import distributed

T = TypeVar("T")


def has_other_ranks() -> bool:
    """Return whether this process is one of several ranks."""
    return distributed.is_initialized() and distributed.get_world_size() > 1


def num_ranks() -> int:
    """Return how many processes there are, 1 without a process group."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def own_rank() -> int:
    """Return the number of this process, 0 without a process group."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def is_leader() -> bool:
    """Return whether this rank acts for all."""
    return not has_other_ranks() or distributed.get_rank() == 0


def from_leader(value: Any) -> Any:  # noqa: ANN401  (any picklable object of our own)
    """Return the leader's value on every rank, when all have come here."""
    if not has_other_ranks():
        return value
    values = [value]
    distributed.broadcast_object_list(values, src=0)
    distributed.barrier()  # a broadcast alone lets the leader go on before the others come
    return values[0]


def to_leader(value: Any) -> list[Any]:  # noqa: ANN401  (any picklable object of our own)
    """Return the values of all ranks in their order on the leader, nothing on the others."""
    if not has_other_ranks():
        return [value]
    values: list[Any] | None = [None] * distributed.get_world_size() if is_leader() else None
    distributed.gather_object(value, values, dst=0)
    return values or []


def to_all(value: T) -> list[T]:
    """Return the values of all ranks in their order, on every rank."""
    values = [value] * num_ranks()
    if has_other_ranks():
        distributed.all_gather_object(values, value)
    return values
