"""The norm of gradients that lie in different ways on ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the norm of all tensors as one vector, a plain scalar that is equal on all ranks.

    Torch's own cannot add up what lies on different meshes, as dealt experts and the rest of a
    model do.

    Args:
        tensors: Whole ones (equal on all ranks), or each rank's shards as DTensors.
    """
    groups: dict[DeviceMesh | None, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device_mesh if isinstance(tensor, DTensor) else None].append(tensor)
    norms = [torch.nn.utils.get_total_norm(group) for group in groups.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.linalg.vector_norm(torch.stack(whole)) if whole else torch.tensor(0.0)
