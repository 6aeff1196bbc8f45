"""Sending objects of our own from rank to rank, each only to the rank that needs it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import distributed

from trace_pl.distributed.leader import has_other_ranks
from trace_pl.distributed.padding import exchange_device

T = TypeVar("T")


def exchange(parcels: Sequence[Sequence[T]]) -> list[T]:
    """Send each rank its parcel and return what all ranks have sent here, when all call this.

    What stays here is not copied. Like torch's own collectives of objects it pickles what travels,
    but nothing goes to ranks that do not need it.

    Args:
        parcels: For each rank the objects that it gets.

    Returns:
        The objects for this rank, in order of the ranks that sent them.
    """
    if not has_other_ranks():
        (own,) = parcels
        return list(own)
    here = distributed.get_rank()
    device = exchange_device(distributed.get_backend_config())
    packed = [
        pickle.dumps(list(parcel)) if rank != here and parcel else b""
        for rank, parcel in enumerate(parcels)
    ]
    sent = [len(data) for data in packed]
    sizes = torch.zeros(len(parcels), dtype=torch.int64, device=device)
    distributed.all_to_all_single(sizes, torch.tensor(sent, device=device))
    received: list[int] = sizes.tolist()
    incoming = torch.empty(sum(received), dtype=torch.uint8, device=device)
    outgoing = torch.frombuffer(bytearray(b"".join(packed)) or bytearray(1), dtype=torch.uint8)
    distributed.all_to_all_single(incoming, outgoing[: sum(sent)].to(device), received, sent)
    found: list[T] = []
    for rank, data in enumerate(incoming.cpu().split(received)):
        if rank == here:
            found.extend(parcels[here])
        elif len(data):
            # Bytes of another rank of this run, which computes with the same code and weights.
            found.extend(pickle.loads(data.numpy().tobytes()))
    return found
