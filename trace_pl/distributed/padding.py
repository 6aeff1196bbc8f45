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
    device = next(model.parameters()).device
    most = torch.tensor(len(batches), device=device)
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    return [*batches, *([()] * (int(most) - len(batches)))]
