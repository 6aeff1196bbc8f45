"""Functions that run inside vLLM's worker: loading pushed weights, and reading them back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trace_pl.errors import RolloutError

Worker = Any  # vLLM's own class, which is not imported here
Model = Any


@torch.no_grad()
def load_weights(worker: Worker, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load weights one by one; what vLLM packed for CPU kernels is packed anew.

    Args:
        worker: of vLLM, which computes on one device.
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
        place = _find(model, modules, name)
        if place is None:
            raise RolloutError(
                f"Expected the weights of the engine's model, got '{name}' of shape "
                f"{list(tensor.shape)}. Give engine and policy the same model, or use HFEngine."
            )
        if not place.is_emptied:
            place.rows(place.tensor)[: len(tensor)].copy_(tensor)
            if name == "lm_head.weight":
                _pack(place.module)
            continue
        parts = waiting.setdefault(id(place.module), {})
        parts[place.part] = tensor
        if len(parts) == place.num_parts:
            del waiting[id(place.module)]
            ordered = [parts[part].to(place.tensor.dtype) for part in sorted(parts)]
            whole = torch.cat(ordered) if len(ordered) > 1 else ordered[0]
            place.module.weight = nn.Parameter(whole, requires_grad=False)
            _pack(place.module)
            assert place.module.weight.numel() == 0, "the packed copy is the only one"
    if waiting:
        raise RolloutError(
            "Expected every weight of the engine's model, got only a part of a fused layer. Give "
            "engine and policy the same model, or use HFEngine."
        )


def pack_tied_head(model: Model) -> None:
    """Pack a head anew from the embedding it is tied to.

    A reload refreshes the embedding alone: on CPU the head would be the first one for ever.
    """
    if _is_tied(model):
        _pack(model.lm_head)


def _pack(module: Any) -> None:  # noqa: ANN401
    module.cpu_linear = None  # frees the old packed copy before there is a new one
    module.quant_method.process_weights_after_loading(module)


def _is_tied(model: Model) -> bool:
    """Return whether the head is the embedding; vLLM may decide otherwise than the config says."""
    head = getattr(getattr(model, "lm_head", None), "weight", None)
    named = model.named_parameters(remove_duplicate=False)
    return any(tensor is head for name, tensor in named if name != "lm_head.weight")


@torch.no_grad()
def weight_differences(
    worker: Worker, named_tensors: Iterable[tuple[str, Tensor]]
) -> dict[str, float]:
    """Return the largest absolute difference of each weight to what the worker computes with.

    Experts are left out: their packed form can not be read.

    Args:
        worker: of vLLM, which computes on one device.
        named_tensors: parameters by their names in a saved checkpoint.
    """
    model = worker.get_model()
    modules = dict(model.named_modules())
    found = {}
    for name, tensor in named_tensors:
        is_head = _is_tied(model) and name.endswith("embed_tokens.weight")
        for used_as in [name, "lm_head.weight"] if is_head else [name]:
            place = _find(model, modules, used_as)
            if place is not None:
                held = place.rows(_computed_with(place, tensor.shape[-1]))[: len(tensor)]
                found[used_as] = float((held - tensor.to(held)).abs().max())
    return found


def _computed_with(place: _Place, num_inputs: int) -> Tensor:
    """Return the numbers that the place's kernel multiplies with."""
    if not place.is_emptied and not place.is_packed_head:
        return place.tensor
    # The kernel's answer to the unit vectors is the transpose of the matrix it holds.
    units = torch.eye(num_inputs, dtype=place.tensor.dtype)
    answer: Tensor = place.module.cpu_linear(units, place.tensor, None)
    return answer.T


@dataclass(frozen=True, slots=True)
class _Place:
    """Where vLLM keeps one tensor of a checkpoint."""

    module: Any
    tensor: Tensor
    is_packed_head: bool
    part: int = 0
    num_parts: int = 1
    """Of a layer that vLLM fuses, such as query, key and value."""

    @property
    def is_emptied(self) -> bool:
        """Whether only a kernel's packed copy is left, as of linear layers on CPU."""
        return not self.tensor.numel()

    def rows(self, whole: Tensor) -> Tensor:
        """Return this part's rows of the fused tensor."""
        if self.num_parts == 1:
            return whole
        return torch.split(whole, self.module.output_partition_sizes)[self.part]


def _find(model: Model, modules: dict[str, Any], name: str) -> _Place | None:
    """Return the place of a checkpoint's tensor, or None where there is no single one."""
    path, _, kind = name.rpartition(".")
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    fused = getattr(mapper, "orig_to_new_stacked", {})  # such as ".q_proj": (".qkv_proj", "q")
    suffix = next((suffix for suffix in fused if path.endswith(suffix)), None)
    parts = [suffix]
    if suffix is not None:
        path = path.removesuffix(suffix) + fused[suffix][0]
        parts = [other for other in fused if fused[other][0] == fused[suffix][0]]
    module = modules.get(path)
    tensor = getattr(module, kind, None)
    if tensor is None:
        return None
    is_packed_head = path == "lm_head" and hasattr(module, "cpu_linear")
    return _Place(module, tensor, is_packed_head, parts.index(suffix), len(parts))
