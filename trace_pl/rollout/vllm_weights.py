"""Functions that run inside vLLM's worker: loading pushed weights, and reading them back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

Worker = Any  # vLLM's own class, which is not imported here


@torch.no_grad()
def load_weights(worker: Worker, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load weights one by one; layers packed for CPU kernels are packed anew.

    Args:
        worker: of vLLM.
        named_tensors: parameters by their names in a saved checkpoint.
    """
    is_cpu = worker.device.type == "cpu"
    if is_cpu:
        _forget_packed_experts(worker)
    worker.reload_weights(weights_iterator=named_tensors)
    if is_cpu:
        _pack_tied_head(worker)


def _forget_packed_experts(worker: Worker) -> None:
    """Let vLLM set up its experts as at the first load.

    It packs experts for the CPU only when it makes their kernel; later loads would leave unpacked
    numbers where the kernel expects packed ones.
    """
    for module in worker.get_model().modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_tied_head(worker: Worker) -> None:
    """Pack the head of a model anew from the embedding it is tied to.

    vLLM's CPU kernels keep a packed copy of the head, and a reload refreshes only the embedding:
    without this the engine would sample with the first head for ever.
    """
    model = worker.get_model()
    if getattr(model.config, "tie_word_embeddings", False):
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


@torch.no_grad()
def weight_differences(
    worker: Worker, named_tensors: Iterable[tuple[str, Tensor]]
) -> dict[str, float]:
    """Return the largest absolute difference of each weight to what the worker computes with.

    Experts are left out: their packed form can not be read.

    Args:
        worker: of vLLM.
        named_tensors: parameters by their names in a saved checkpoint.
    """
    model = worker.get_model()
    is_tied = getattr(model.config, "tie_word_embeddings", False)
    found = {}
    for name, tensor in named_tensors:
        names = [name, "lm_head.weight"] if is_tied and "embed_tokens" in name else [name]
        for used_as in names:
            held = _held_weight(model, used_as, tensor)
            if held is not None:
                found[used_as] = float((held - tensor.to(held)).abs().max())
    return found


def _held_weight(model: Any, name: str, like: Tensor) -> Tensor | None:  # noqa: ANN401
    """Return a weight of vLLM's model by its checkpoint name, or None if it can not be read."""
    path, _, kind = name.rpartition(".")
    stacked = model.hf_to_vllm_mapper.orig_to_new_stacked
    part = next((part for part in stacked if path.endswith(part)), None)
    if part is not None:
        path = path.removesuffix(part) + stacked[part][0]
    module: Any = dict(model.named_modules()).get(path)
    held: Tensor | None = getattr(module, kind, None)
    if held is None:
        return None
    is_head = path == "lm_head"
    if kind == "weight" and hasattr(module, "cpu_linear") and (is_head or not held.numel()):
        # Packed: the kernel's answer to the unit vectors is the matrix it holds.
        units = torch.eye(like.shape[1], dtype=held.dtype)
        held = torch.transpose(module.cpu_linear(units, held, None), 0, 1)
    if part is not None:
        siblings = [other for other, (fused, _) in stacked.items() if fused == stacked[part][0]]
        held = torch.split(held, module.output_partition_sizes)[siblings.index(part)]
    return held[: len(like)]  # without the rows that fill up a vocabulary
