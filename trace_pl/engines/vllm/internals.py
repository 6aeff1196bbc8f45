"""What trace_pl uses of vLLM beyond its documented interface, each with the reason.

It is used from here alone, but for the reload of layers, which stands in ``server.worker`` with
what a server takes from its plugins. ``tests/engines/test_vllm_contract.py`` fails by name if an
upgrade of vLLM removes any of it.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

Worker = Any  # vLLM's own classes, which are not imported here
Model = Any
Module = Any

# --- starting and stopping ----------------------------------------------------------------------


def register_model_class(vllm: ModuleType, path: str) -> None:
    """Tell vLLM the class of a local model.

    Otherwise it starts a second interpreter to look at the class, which takes about 10 s for the
    first model of its kind on a machine.
    """
    config = Path(path) / "config.json"
    if not config.is_file():
        return
    for architecture in json.loads(config.read_text()).get("architectures", []):
        known = vllm.ModelRegistry.models.get(architecture)
        if known is not None:
            vllm.ModelRegistry.register_model(architecture, known.load_model_cls())


def fork_server_engine() -> None:
    """Let a server on CPU fork its engine.

    The CPU build starts it as a new interpreter, which imports everything once more. There is no
    accelerator that a fork could break, and no thread has computed yet.
    """
    utils: Any = importlib.import_module("vllm.v1.engine.utils")
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")


def parse_serve(arguments: Sequence[str]) -> Any:  # noqa: ANN401
    """Return what `vllm serve` makes of its arguments; a plugin cannot add to them."""
    serve: Any = importlib.import_module("vllm.entrypoints.cli.serve")
    return serve.make_arg_parser(serve.FlexibleArgumentParser()).parse_args(list(arguments))


def serve(args: Any) -> None:  # noqa: ANN401
    """Run `vllm serve` in this process until it is stopped."""
    command: Any = importlib.import_module("vllm.entrypoints.cli.serve").ServeSubcommand()
    command.validate(args)
    command.cmd(args)


def stop_engine(engine: Any, owns_group: bool) -> None:  # noqa: ANN401
    """Stop an engine in this process; left to the garbage collector it keeps its memory.

    Args:
        engine: vLLM's ``LLMEngine``.
        owns_group: whether vLLM made the process group, which then goes as well.
    """
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    destroy = state.destroy_distributed_environment
    if not owns_group:
        # vLLM's own would take the default group down, whoever made it and still trains with it.
        state.destroy_distributed_environment = partial(_destroy_own_groups, state)
    try:
        engine.engine_core.shutdown()
    finally:
        state.destroy_distributed_environment = destroy


def _destroy_own_groups(state: Any) -> None:  # noqa: ANN401
    if state._WORLD is not None:
        state._WORLD.destroy()
    state._WORLD = state._NODE_COUNT = None


# --- weights on CPU, which vLLM packs for its kernels -------------------------------------------


def names_are_plain(model: Model) -> bool:
    """Return whether vLLM names modules as the checkpoint does, but for fused ones.

    Its own loading translates names as it goes, and shows no other way to do so.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    renamings = {} if mapper is None else {**vars(mapper), "orig_to_new_stacked": None}
    return mapper is not None and not any(renamings.values())


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


def pack(module: Module) -> None:
    """Pack a module's weight for its kernel anew, which vLLM does by itself only at the start."""
    module.cpu_linear = None  # frees the old packed copy before there is a new one
    module.quant_method.process_weights_after_loading(module)


def pack_tied_head(model: Model) -> None:
    """Pack a head anew from the embedding it is tied to.

    A reload refreshes the embedding alone: the head would be the first one forever.
    """
    if is_tied(model):
        pack(model.lm_head)


def is_tied(model: Model) -> bool:
    """Return whether the head is the embedding; vLLM may decide otherwise than the config says."""
    head = getattr(getattr(model, "lm_head", None), "weight", None)
    named = model.named_parameters(remove_duplicate=False)
    return any(tensor is head for name, tensor in named if name != "lm_head.weight")


@dataclass(frozen=True, slots=True)
class Place:
    """Where vLLM keeps one tensor of a checkpoint."""

    module: Module
    tensor: Tensor
    is_head: bool
    part: int = 0
    num_parts: int = 1
    """Number of tensors that vLLM fuses here, such as query, key and value."""

    @property
    def is_emptied(self) -> bool:
        """Whether only a kernel's packed copy is left, as of linear layers."""
        return not self.tensor.numel()

    @property
    def is_packed(self) -> bool:
        """Whether a kernel multiplies with a packed copy; the head keeps the other one as well."""
        return self.is_emptied or (self.is_head and hasattr(self.module, "cpu_linear"))

    def rows(self, whole: Tensor) -> Tensor:
        """Return this part's rows of the fused tensor."""
        if self.num_parts == 1:
            return whole
        return torch.split(whole, self.module.output_partition_sizes)[self.part]

    def overwrite(self, tensor: Tensor) -> None:
        """Copy a tensor over the one that is kept; rows that fill up a vocabulary stay."""
        self.rows(self.tensor)[: len(tensor)].copy_(tensor)
        if self.is_head and self.is_packed:
            pack(self.module)

    def replace(self, parts: Sequence[Tensor]) -> None:
        """Pack all parts of a layer of which vLLM has kept the packed copy alone."""
        cast = [part.to(self.tensor.dtype) for part in parts]
        whole = torch.cat(cast) if len(cast) > 1 else cast[0]
        self.module.weight = nn.Parameter(whole, requires_grad=False)
        pack(self.module)
        assert self.module.weight.numel() == 0, "the packed copy is the only one"

    def computed_with(self, num_inputs: int) -> Tensor:
        """Return the numbers that the kernel multiplies with."""
        if not self.is_packed:
            return self.rows(self.tensor)
        # The kernel's answer to the unit vectors is the transpose of the matrix it holds.
        units = torch.eye(num_inputs, dtype=self.tensor.dtype)
        answer: Tensor = self.module.cpu_linear(units, self.tensor, None)
        return self.rows(answer.T)


def find_place(model: Model, modules: dict[str, Module], name: str) -> Place | None:
    """Return the place of a checkpoint's tensor, or None where there is no single one.

    Args:
        model: vLLM's model.
        modules: its ``named_modules``.
        name: name of the tensor in the checkpoint.
    """
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
    return Place(module, tensor, path == "lm_head", parts.index(suffix), len(parts))
