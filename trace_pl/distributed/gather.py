"""Whole tensors out of a model whose parameters are spread over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.distributed.tensor import DTensor


def full_tensors(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor whole, gathering sharded ones as they are asked for.

    A gathered tensor lives only as long as the caller keeps it. Gathering is collective: every rank
    must read all of the same names in the same order, also where it has no use for them.

    Args:
        named: names and tensors; sharded ones are DTensors, others pass through as they are.
    """
    for name, tensor in named:
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
