"""Sharding a causal language model over processes with FSDP2, one decoder layer at a time."""

from __future__ import annotations

from types import MethodType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers import PreTrainedModel

from trace_pl.experts import routers
from trace_pl.scoring.packed_forward import FORWARD, read_rows


def shard_model(
    model: PreTrainedModel, mesh: DeviceMesh, compute_dtype: torch.dtype, on_cpu: bool = False
) -> None:
    """Shard a model in place; it becomes a root of its own.

    A layer's parameters are gathered in ``compute_dtype`` when it runs and freed after it;
    gradients are reduced in float32. Routers of experts compute in float32: a token near the border
    between two experts must not go to another one than in the engine for a rounding error.

    Args:
        model: On any device, ``meta`` included.
        mesh: One dimension (all ranks share one copy), or two (copies, ranks that share one).
        compute_dtype: Of the forward and backward pass.
        on_cpu: Keeps the shards in main memory and copies each layer in when it runs.
    """
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if on_cpu else OffloadPolicy()

    def shard(module: nn.Module, dtype: torch.dtype) -> None:
        precision = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=compute_dtype)
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)

    decoder, head = model.get_decoder(), model.get_output_embeddings()
    for router in routers(model):
        shard(router, torch.float32)
    for layer in decoder.layers:
        shard(layer, compute_dtype)
    if head.weight is not decoder.embed_tokens.weight:
        shard(decoder.embed_tokens, compute_dtype)
    shard(model, compute_dtype)
    setattr(model, FORWARD, MethodType(read_rows, model))
    register_fsdp_forward_method(model, FORWARD)
