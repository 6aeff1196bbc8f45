"""What ranks send each other, and how fast links, memory and cores are."""

from __future__ import annotations

from trace_pl.commands.plan.activations import exchanged
from trace_pl.commands.plan.inputs import Device, PlannedRun

TERA, GIGA = 1e12, 1e9


def update_traffic(run: PlannedRun, forwards: int, steps: int) -> tuple[float, float]:
    """Return the bytes that one GPU sends for the updates of an epoch, and their seconds."""
    shape, sharding = run.shape, run.sharding
    gradient = shape.trained * sharding.master_bytes
    if sharding.kind == "ddp":
        sent = steps * 2 * gradient * others(sharding.world)
        return sent, sent / link_rate(run, sharding.world)
    # Weights are gathered for the forward and again for the backward pass; gradients are summed up
    # among the GPUs of a copy, then among copies.
    weights = 2 * from_others(run, shape.total, sharding.param_bytes)
    trains_experts = shape.trained > shape.counts.adapter
    inside = forwards * (
        weights + from_others(run, shape.trained, sharding.master_bytes, trains_experts)
    )
    among = forwards * 2 * gradient / sharding.shard * others(sharding.num_replicas)
    seconds = inside / link_rate(run, sharding.shard) + among / link_rate(run, sharding.world)
    return inside + among, seconds


def from_others(
    run: PlannedRun, parameters: int, num_bytes: int, has_experts: bool = True
) -> float:
    """Return the bytes that one GPU gets to hold parameters whole, or its part of the experts."""
    sharding = run.sharding
    experts = run.shape.counts.experts if has_experts else 0
    dealt = experts / sharding.expert_parallel
    holders = sharding.shard // sharding.expert_parallel  # of the same experts
    whole = (parameters - experts) * others(sharding.shard) + dealt * others(holders)
    return whole * num_bytes


def exchange_bytes(run: PlannedRun) -> float:
    """Return the bytes that a token sends to experts of other GPUs in all layers, one way."""
    away = others(run.sharding.expert_parallel)
    return away * exchanged(run.shape, run.sharding.param_bytes) * run.shape.layers


def others(group: int) -> float:
    """Share of a tensor that a member of a ring sends on or gets from the others."""
    return (group - 1) / group


def link_rate(run: PlannedRun, group: int) -> float:
    """Return the bytes a second that a group of ranks reaches with each other."""
    is_inside = group <= run.sharding.gpus_per_node
    rate = run.device.link_gb_s if is_inside else run.device.network_gb_s
    return reached(run.device, rate * GIGA)


def compute_rate(device: Device, num_bytes: int) -> float:
    """Return the operations a second that matrix products of this number format reach."""
    peak = device.peak_tflops if num_bytes < 4 else device.peak_tflops_fp32
    return peak * TERA * device.utilisation


def reached(device: Device, peak: float) -> float:
    """Return the bytes a second that are reached of a peak."""
    return peak * device.bandwidth_utilisation
