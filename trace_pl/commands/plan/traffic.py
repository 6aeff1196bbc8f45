"""What ranks send each other, and how fast links, memory and cores are."""

from __future__ import annotations

from dataclasses import dataclass

from trace_pl.commands.plan.activations import exchanged
from trace_pl.commands.plan.inputs import Device, PlannedRun

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Transfer:
    """Bytes that one GPU sends or gets, and the seconds that they take."""

    num_bytes: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Transfer) -> Transfer:
        """Return both, one after the other."""
        return Transfer(self.num_bytes + other.num_bytes, self.seconds + other.seconds)


def among_ranks(run: PlannedRun, num_bytes: float, group: int) -> Transfer:
    """Return a transfer within a group of ranks, over the network where a node is too small."""
    is_inside = group <= run.sharding.gpus_per_node
    rate = run.device.link_gb_s if is_inside else run.device.network_gb_s
    return Transfer(num_bytes, num_bytes / reached(run.device, rate * GIGA))


def from_main_memory(run: PlannedRun, num_bytes: float) -> Transfer:
    """Return a transfer from main memory to the GPU."""
    return Transfer(num_bytes, num_bytes / reached(run.device, run.device.host_gb_s * GIGA))


def update_traffic(run: PlannedRun, forwards: int, steps: int) -> Transfer:
    """Return what one GPU sends for the updates of an epoch.

    Under ddp a gradient is summed up among all. Sharded, weights are gathered for the forward and
    again for the backward pass; gradients are summed up among the GPUs of a copy, then among
    copies.

    Args:
        run: The run.
        forwards: Forwards of the epoch, each with its backward pass.
        steps: Optimizer steps of the epoch.
    """
    shape, sharding = run.shape, run.sharding
    gradient = shape.trained * sharding.master_bytes
    if sharding.kind == "ddp":
        return among_ranks(run, steps * 2 * gradient * others(sharding.world), sharding.world)
    trains_experts = shape.trained > shape.counts.adapter
    weights = 2 * from_others(run, shape.total, sharding.param_bytes)
    gradients = from_others(run, shape.trained, sharding.master_bytes, trains_experts)
    within = forwards * (weights + gradients)
    between = forwards * 2 * gradient / sharding.shard * others(sharding.num_replicas)
    return among_ranks(run, within, sharding.shard) + among_ranks(run, between, sharding.world)


def expert_exchange(run: PlannedRun, tokens: float, turns: int) -> Transfer:
    """Return the travels of tokens to experts of other GPUs in all layers.

    Args:
        run: The run.
        tokens: Tokens of one GPU.
        turns: Times that each goes one way.
    """
    group = run.sharding.expert_parallel
    of_token = others(group) * exchanged(run.shape, run.sharding.param_bytes) * run.shape.layers
    return among_ranks(run, turns * tokens * of_token, group)


def from_others(
    run: PlannedRun, parameters: int, num_bytes: int, has_experts: bool = True
) -> float:
    """Return the bytes that one GPU gets to hold parameters whole, or its part of the experts.

    Args:
        run: The run.
        parameters: Parameters in all, experts included.
        num_bytes: Bytes of each.
        has_experts: Whether those of experts are among them.
    """
    sharding = run.sharding
    experts = run.shape.counts.experts if has_experts else 0
    dealt = experts / sharding.expert_parallel
    holders = sharding.shard // sharding.expert_parallel  # of the same experts
    whole = (parameters - experts) * others(sharding.shard) + dealt * others(holders)
    return whole * num_bytes


def others(group: int) -> float:
    """Return the share of a tensor that a member of a ring gets from the others."""
    return (group - 1) / group


def compute_rate(device: Device, num_bytes: int) -> float:
    """Return the operations a second that matrix products of this number format reach."""
    peak = device.peak_tflops if num_bytes < 4 else device.peak_tflops_fp32
    return peak * TERA * device.utilisation


def reached(device: Device, peak: float) -> float:
    """Return the bytes a second that are reached of a peak."""
    return peak * device.bandwidth_utilisation
