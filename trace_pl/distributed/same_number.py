"""Equal numbers of forwards on all ranks: a sharded model gathers its weights from all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule

Item = TypeVar("Item")


def same_number(batches: Sequence[Sequence[Item]], model: nn.Module) -> list[Sequence[Item]]:
    """Return the batches, filled up with empty ones to as many as any rank has.

    Without this the ranks that have more would wait for ever for the weights of the others.

    Args:
        batches: Of this rank; possibly none.
        model: What will read them; only a sharded one needs company.
    """
    if not isinstance(model, FSDPModule):
        return list(batches)
    device = next(model.parameters()).device
    most = torch.tensor(len(batches), device=device)
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    return [*batches, *([()] * (int(most) - len(batches)))]
