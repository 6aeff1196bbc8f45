"""Where vLLM keeps the tensors of a checkpoint, and what its CPU kernels multiply with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Worker = Any  # vLLM's own classes, which are not imported here
Model = Any


@dataclass(frozen=True, slots=True)
class Place:
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


def find_place(model: Model, modules: dict[str, Any], name: str) -> Place | None:
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
    return Place(module, tensor, is_packed_head, parts.index(suffix), len(parts))


def computed_with(place: Place, num_inputs: int) -> Tensor:
    """Return the numbers that the place's kernel multiplies with."""
    if not place.is_emptied and not place.is_packed_head:
        return place.tensor
    # The kernel's answer to the unit vectors is the transpose of the matrix it holds.
    units = torch.eye(num_inputs, dtype=place.tensor.dtype)
    answer: Tensor = place.module.cpu_linear(units, place.tensor, None)
    return answer.T


def pack(module: Any) -> None:  # noqa: ANN401
    """Let vLLM pack a module's weight for its kernel anew."""
    module.cpu_linear = None  # frees the old packed copy before there is a new one
    module.quant_method.process_weights_after_loading(module)


def is_tied(model: Model) -> bool:
    """Return whether the head is the embedding; vLLM may decide otherwise than the config says."""
    head = getattr(getattr(model, "lm_head", None), "weight", None)
    named = model.named_parameters(remove_duplicate=False)
    return any(tensor is head for name, tensor in named if name != "lm_head.weight")
