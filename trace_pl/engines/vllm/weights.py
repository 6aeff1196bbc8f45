"""Functions that run inside vLLM's worker: loading pushed weights, and reading them back.

On a GPU vLLM's own reload does it. On a CPU vLLM packs weights for its kernels once, when it first
loads a model, and three things follow. A linear layer keeps the packed copy alone, so new numbers
have to be packed again. Experts are packed when their kernel is made, so the kernel has to be made
again. A head that is tied to the embedding is packed apart, and a reload refreshes the embedding
alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from trace_pl.engines.vllm.internals import (
    Model,
    Module,
    Worker,
    find_place,
    forget_packed_experts,
    is_tied,
    names_are_plain,
    pack_tied_head,
)
from trace_pl.errors import RolloutError


@torch.no_grad()
def load_weights(worker: Worker, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load weights one by one; what vLLM packed for CPU kernels is packed anew.

    Args:
        worker: vLLM's worker, which computes on one device.
        named_tensors: parameters by their names in a saved checkpoint.

    Raises:
        RolloutError: if they are not those of a dense model on CPU.
    """
    if worker.device.type != "cpu":
        worker.reload_weights(weights_iterator=named_tensors)
        return
    model = worker.get_model()
    if forget_packed_experts(model) or not names_are_plain(model):
        worker.reload_weights(weights_iterator=named_tensors)
    else:
        _load_dense(model, named_tensors)
    pack_tied_head(model)


def _load_dense(model: Model, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load a model without experts on CPU.

    vLLM's own reload loads every layer twice, once to count and once to keep, copies it into a
    third place and also packs the embedding, which no kernel multiplies with.
    """
    modules = dict(model.named_modules())
    waiting: defaultdict[Module, dict[int, Tensor]] = defaultdict(dict)
    for name, tensor in named_tensors:
        place = find_place(model, modules, name)
        if place is None:
            raise RolloutError(
                f"Expected the weights of the engine's model, got '{name}' of shape "
                f"{list(tensor.shape)}. Give engine and policy the same model, or use HFEngine."
            )
        if not place.is_emptied:
            place.overwrite(tensor)
            continue
        waiting[place.module][place.part] = tensor
        if len(waiting[place.module]) == place.num_parts:
            parts = waiting.pop(place.module)
            place.replace([parts[part] for part in sorted(parts)])
    if waiting:
        raise RolloutError(
            "Expected every weight of the engine's model, got only a part of a fused layer. Give "
            "engine and policy the same model, or use HFEngine."
        )


@torch.no_grad()
def weight_differences(
    worker: Worker, named_tensors: Iterable[tuple[str, Tensor]]
) -> dict[str, float]:
    """Return the largest absolute difference of each weight to what the worker computes with.

    Experts are left out: their packed form cannot be read.

    Args:
        worker: vLLM's worker, which computes on one device.
        named_tensors: parameters by their names in a saved checkpoint.
    """
    model = worker.get_model()
    modules = dict(model.named_modules())
    has_tied_head = is_tied(model)
    found = {}
    for name, tensor in named_tensors:
        is_head = has_tied_head and name.endswith("embed_tokens.weight")
        for used_as in [name, "lm_head.weight"] if is_head else [name]:
            place = find_place(model, modules, used_as)
            if place is not None:
                held = place.computed_with(tensor.shape[-1])[: len(tensor)]
                found[used_as] = float((held - tensor.to(held)).abs().max())
    return found
