"""What one rank does for all of them, such as talking to a server that they share."""

from __future__ import annotations

from typing import Any

from torch import distributed


def has_other_ranks() -> bool:
    """Return whether this process is one of several ranks."""
    return distributed.is_initialized() and distributed.get_world_size() > 1


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
