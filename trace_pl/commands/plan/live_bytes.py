"""Counting the memory of tensors, on those that hold numbers and on those that only say they do.

Modes that see every operation, those of the backward pass included, and tensors without numbers
have names in torch's documentation, but no public place to import them from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["FakeTensorMode", "LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make while the mode is on, and the most alive at once.

    Args:
        weights: Tensors whose views and casts are not counted.
    """

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._weights = _storages(weights)
        self._made: WeakSet[torch.UntypedStorage] = WeakSet()

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operation and count what it made: neither a view nor in place."""
        result = _run(func, args, kwargs or {})
        results = _tensors(result)
        if not results:  # questions for a size, a type or a device are half of all operations
            return result
        given = _storages(_tensors((args, kwargs)))
        if not given or not given <= self._weights:
            for storage in (tensor.untyped_storage() for tensor in results):
                if storage._cdata not in given:
                    self._made.add(storage)
        # Sharding shrinks and grows storages, so sizes are asked for again.
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._made))
        return result

    def has_made(self, tensor: Tensor) -> bool:
        """Return whether the storage of a tensor is one of those counted."""
        return tensor.untyped_storage() in self._made


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    if func is torch.ops.aten._grouped_mm.default and isinstance(args[0], FakeTensor):
        # torch knows the shape of a grouped product in bfloat16 only.
        return args[0].new_empty(len(args[0]), args[1].shape[-1])
    return func(*args, **kwargs)


def _tensors(tree: Any) -> list[Tensor]:  # noqa: ANN401  (any nest of containers)
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {x.untyped_storage()._cdata for x in tensors}
