"""Functions that run inside vLLM's worker: loading pushed weights, and reading them back.

On a GPU vLLM's own reload does it. On a CPU vLLM packs weights for its kernels once, when it first
loads a model, and three things follow. A linear layer keeps the packed copy alone, so new numbers
have to be packed again. Experts are packed when their kernel is made, so the kernel has to be made
again. A head that is tied to the embedding is packed apart, and a reload refreshes the embedding
alone. Where vLLM keeps what is in ``places``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trace_pl.engines.vllm.places import (
    Model,
    Worker,
    computed_with,
    find_place,
    is_tied,
    pack,
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
    if forget_packed_experts(model) or not _names_are_plain(model):
        worker.reload_weights(weights_iterator=named_tensors)
    else:
        _load_dense(model, named_tensors)
    pack_tied_head(model)


def forget_packed_experts(model: Model) -> bool:
    """Let vLLM set up experts as at the first load, and return whether there are any.

    It packs them for the CPU only when it makes their kernel; later loads would leave unpacked
    numbers where the kernel expects packed ones.
    """
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    with_kernel: list[Any] = [m for m in methods if getattr(m, "moe_kernel", None) is not None]
    for method in with_kernel:
        method.moe_kernel = None
    return bool(with_kernel)


def _names_are_plain(model: Model) -> bool:
    """Return whether vLLM names modules as the checkpoint does, but for fused ones."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    renamings = ("orig_to_new_substr", "orig_to_new_prefix", "orig_to_new_suffix")
    return mapper is not None and not any(getattr(mapper, kind, None) for kind in renamings)


def _load_dense(model: Model, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load a model without experts on CPU.

    vLLM's own reload loads every layer twice, once to count and once to keep, copies it into a
    third place and also packs the embedding, which no kernel multiplies with.
    """
    modules = dict(model.named_modules())
    waiting: dict[int, dict[int, Tensor]] = {}
    for name, tensor in named_tensors:
        place = find_place(model, modules, name)
        if place is None:
            raise RolloutError(
                f"Expected the weights of the engine's model, got '{name}' of shape "
                f"{list(tensor.shape)}. Give engine and policy the same model, or use HFEngine."
            )
        if not place.is_emptied:
            place.rows(place.tensor)[: len(tensor)].copy_(tensor)
            if name == "lm_head.weight":
                pack(place.module)
            continue
        parts = waiting.setdefault(id(place.module), {})
        parts[place.part] = tensor
        if len(parts) == place.num_parts:
            del waiting[id(place.module)]
            ordered = [parts[part].to(place.tensor.dtype) for part in sorted(parts)]
            whole = torch.cat(ordered) if len(ordered) > 1 else ordered[0]
            place.module.weight = nn.Parameter(whole, requires_grad=False)
            pack(place.module)
            assert place.module.weight.numel() == 0, "the packed copy is the only one"
    if waiting:
        raise RolloutError(
            "Expected every weight of the engine's model, got only a part of a fused layer. Give "
            "engine and policy the same model, or use HFEngine."
        )


def pack_tied_head(model: Model) -> None:
    """Pack a head anew from the embedding it is tied to.

    A reload refreshes the embedding alone: on CPU the head would be the first one forever.
    """
    if is_tied(model):
        pack(model.lm_head)


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
    found = {}
    for name, tensor in named_tensors:
        is_head = is_tied(model) and name.endswith("embed_tokens.weight")
        for used_as in [name, "lm_head.weight"] if is_head else [name]:
            place = find_place(model, modules, used_as)
            if place is not None:
                held = place.rows(computed_with(place, tensor.shape[-1]))[: len(tensor)]
                found[used_as] = float((held - tensor.to(held)).abs().max())
    return found
