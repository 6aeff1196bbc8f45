"""Equal numbers of forwards on all ranks: a sharded model gathers its weights from all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule

Item = TypeVar("Item")


def pad_batches(batches: Sequence[Sequence[Item]], model: nn.Module) -> list[Sequence[Item]]:
    """Return the batches, padded with empty ones to as many as the rank with most has.

    Without this, ranks that have more of them would wait forever for the weights of the others.

    Args:
        batches: Batches of this rank, possibly none.
        model: The model that will read them; only a sharded one needs all ranks.
    """
    if not isinstance(model, FSDPModule):
        return list(batches)
    most = torch.tensor(len(batches), device=exchange_device(distributed.get_backend_config()))
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    return [*batches, *([()] * (int(most) - len(batches)))]


def exchange_device(backends: str) -> torch.device:
    """Return where a tensor has to lie for all ranks to exchange it.

    That is not where the parameters of an offloaded model lie: NCCL exchanges nothing between main
    memories.

    Args:
        backends: Backends of a process group by device, such as "cpu:gloo,cuda:nccl".
    """
    if "cpu:" in backends:
        return torch.device("cpu")
    return torch.device(backends.partition(":")[0])
