"""Sharding a causal language model over processes with FSDP2, one decoder layer at a time."""

from __future__ import annotations

from types import MethodType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers import PreTrainedModel

from trace_pl.distributed.expert_parallel import deal_experts
from trace_pl.models.experts import routers
from trace_pl.models.packed_forward import FORWARD, read_rows


def shard_model(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    on_cpu: bool = False,
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shard a model in place; it becomes a root of its own.

    A layer's parameters are gathered in ``compute_dtype`` when it runs and freed after it;
    gradients are reduced in float32. Routers of experts compute in float32: a token near the border
    between two experts must not go to another one than in the engine for a rounding error.

    Args:
        model: On any device, ``meta`` included.
        mesh: One dimension (all ranks share one copy), or two (copies, ranks that share one).
        compute_dtype: Number format of the forward and backward pass.
        on_cpu: Keeps the shards in main memory and copies each layer in when it runs.
        expert_mesh: Dimensions "shard" and "expert", in front of them "replicate" where ``mesh``
            has two. Experts are dealt to the ranks of the last, and what a rank gets is shared
            among those of the first. None shards them like the rest of their layer.

    Raises:
        ConfigError: if the experts cannot be dealt.
    """
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if on_cpu else OffloadPolicy()

    def shard(
        module: nn.Module,
        dtype: torch.dtype,
        mesh: DeviceMesh = mesh,
        output_dtype: torch.dtype | None = compute_dtype,
    ) -> None:
        precision = MixedPrecisionPolicy(dtype, torch.float32, output_dtype)
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)

    decoder, head = model.get_decoder(), model.get_output_embeddings()
    for router in routers(model):
        shard(router, torch.float32)
    if expert_mesh is not None:
        assert expert_mesh.mesh_dim_names is not None
        copies = expert_mesh[expert_mesh.mesh_dim_names[:-1]]
        for experts in deal_experts(model, expert_mesh["expert"]):
            shard(experts, compute_dtype, copies)
            _divide_by_all_ranks(experts, mesh, copies)
    for layer in decoder.layers:
        shard(layer, compute_dtype)
    if head.weight is not decoder.embed_tokens.weight:
        shard(decoder.embed_tokens, compute_dtype)
    shard(model, compute_dtype, output_dtype=None)  # log-probs stay float32
    setattr(model, FORWARD, MethodType(read_rows, model))
    register_fsdp_forward_method(model, FORWARD)


def _divide_by_all_ranks(experts: nn.Module, mesh: DeviceMesh, copies: DeviceMesh) -> None:
    """Average gradients as those of all other weights, over all ranks, whose tokens they are of.

    FSDP by itself divides by the ranks it reduces over, here those that hold the same experts.
    """
    assert isinstance(experts, FSDPModule)
    experts.set_gradient_divide_factor(float(mesh.size()))
    # Sums divided afterwards also work on gloo. Over a single rank there is no sum, and torch 2.13
    # would divide twice.
    experts.set_force_sum_reduction_for_comms(copies.size(-1) > 1)
