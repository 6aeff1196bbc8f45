"""One of two processes: shards a model, gathers it parameter by parameter, compares."""

import weakref

import torch
from processes import leave
from random_models import make_qwen3, make_qwen3_moe
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trace_pl.models.adapters import LoRA, merged_tensors
from trace_pl.models.weights import full_tensors, policy_tensors


def main() -> None:
    """Gather three models and leave."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    # Five heads and 97 rows of the vocabulary: no dimension divides evenly among two ranks.
    ragged = {"vocab_size": 97, "hidden_size": 27, "intermediate_size": 45, "head_dim": 10}
    adapted = make_qwen3(**ragged)
    LoRA(rank=3).attach(adapted)
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    for model in (make_qwen3(**ragged), make_qwen3_moe(num_experts=3), adapted):
        expected = [(name, tensor.clone()) for name, tensor in policy_tensors(model)]
        for layer in model.get_decoder().layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        found = list(policy_tensors(model))
        assert [name for name, _ in found] == [name for name, _ in expected]
        for (name, tensor), (_, whole) in zip(found, expected, strict=True):
            assert type(tensor) is torch.Tensor, name
            torch.testing.assert_close(tensor, whole, rtol=0, atol=1e-6, msg=name)
        assert_cast_before_it_travels(model, found)
        assert_one_lives(model)
    leave()


def assert_cast_before_it_travels(model: torch.nn.Module, whole: list) -> None:
    """Two bytes a number are gathered for an engine of bfloat16, and they are its numbers."""
    gather, num_bytes = DTensor.full_tensor, []

    def counted(tensor: DTensor, **settings: object) -> torch.Tensor:
        num_bytes.append(tensor.numel() * tensor.element_size())
        return gather(tensor, **settings)

    DTensor.full_tensor = counted
    try:
        found = list(policy_tensors(model, torch.bfloat16))
    finally:
        DTensor.full_tensor = gather
    assert sum(num_bytes) == sum(2 * p.numel() for _, p in merged_tensors(model))
    for (name, tensor), (_, exact) in zip(found, whole, strict=True):
        torch.testing.assert_close(tensor, exact.bfloat16(), rtol=0, atol=0, msg=name)


def assert_one_lives(model: torch.nn.Module) -> None:
    """Every gathered tensor is gone before the next one comes."""
    earlier = None
    for _, tensor in full_tensors(model.named_parameters()):
        assert earlier is None or earlier() is None
        earlier = weakref.ref(tensor)
        del tensor
