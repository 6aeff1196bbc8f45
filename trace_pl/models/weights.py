"""A policy's weights as an engine takes them: whole, merged, under checkpoint names, one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import groupby

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
    revert_weight_conversion,
)

from trace_pl.models.adapters import merged_tensors

Named = Iterable[tuple[str, Tensor]]


def policy_tensors(
    model: PreTrainedModel, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a policy for a push.

    Adapters are merged, sharded parameters gathered and packed experts taken apart, one layer at a
    time, so no second copy of the model is made. All ranks of a sharded policy must read it to its
    end.

    Args:
        model: the policy.
        dtype: number format in which sharded parameters are gathered; None keeps theirs.
    """
    return checkpoint_tensors(model, full_tensors(merged_tensors(model), dtype))


def pushable_tensors(
    model: PreTrainedModel, version: Callable[[], int], dtype: torch.dtype | None = None
) -> Named:
    """Return the weights of :func:`policy_tensors` for an engine that may want them again.

    They can be read again until the model's version is another; those of a sharded model only once,
    for all ranks have to take part.

    Args:
        model: the policy.
        version: returns its version.
        dtype: number format in which sharded parameters are gathered; None keeps theirs.
    """
    if isinstance(model, FSDPModule):
        return policy_tensors(model, dtype)
    return _Pushable(model, version)


class _Pushable(Named):
    def __init__(self, model: PreTrainedModel, version: Callable[[], int]) -> None:
        self._model = model
        self._version = version
        self._first = version()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        assert self._version() == self._first, "the policy has moved on"
        return policy_tensors(self._model)


@torch.no_grad()
def checkpoint_tensors(model: PreTrainedModel, named: Named) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors as ``save_pretrained`` writes them, one layer of the model at a time.

    Transformers holds the experts of a layer in one tensor; a checkpoint has one for each.

    Args:
        model: the model whose parameters they are.
        named: tensors under the model's own names, those of a layer in one run.
    """
    if not getattr(model, "_weight_conversions", [None]):
        yield from named  # the model was loaded and nothing in it is packed or renamed
        return
    for _, layer in groupby(named, _layer):
        yield from revert_weight_conversion(model, dict(layer)).items()


@torch.no_grad()
def model_tensors(model: PreTrainedModel, named: Named) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors as the model holds them; undoes :func:`checkpoint_tensors`.

    Args:
        model: the model that is to hold them.
        named: tensors under checkpoint names, those of a layer in one run.
    """
    conversions: Sequence[WeightTransform] | None = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    for _, layer in groupby(named, _layer):
        packed: dict[str, WeightConverter] = {}
        for name, tensor in layer:
            target, pattern = rename_source_key(name, renamings, converters)
            if pattern is None:
                yield target, tensor
                continue
            converter = packed.setdefault(target, deepcopy(by_pattern[pattern]))
            converter.add_tensor(target, name, pattern, tensor)  # type: ignore[arg-type]
        for target, converter in packed.items():
            yield from converter.convert(target, model=model, config=model.config).items()


def full_tensors(named: Named, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor whole, gathering sharded ones as they are asked for.

    A gathered tensor lives only as long as the caller keeps it. Gathering is collective: every rank
    must read all of the same names in the same order, also where it has no use for them.

    Args:
        named: names and tensors; sharded ones are DTensors, others pass through as they are.
        dtype: number format of what is gathered, cast before it travels; None keeps its own.
    """
    for name, tensor in named:
        if isinstance(tensor, DTensor):
            sent: DTensor = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor  # type: ignore[assignment]
            yield name, sent.full_tensor()
        else:
            yield name, tensor


def cast(named: Named, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors with their numbers in a format; None keeps it."""
    for name, tensor in named:
        yield name, tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor


def chunked(named: Named, num_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield tensors in dicts of at most a size, except that a larger one has a dict to itself."""
    chunk: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named:
        if chunk and size + tensor.nbytes > num_bytes:
            yield chunk
            chunk, size = {}, 0
        chunk[name] = tensor.detach().contiguous()
        size += tensor.nbytes
    if chunk:
        yield chunk


def _layer(item: tuple[str, Tensor]) -> str:
    """Return the name up to the first number, which is that of the layer, or all of it."""
    found = re.match(r".*?\.\d+\.", item[0])
    return found[0] if found else item[0]
