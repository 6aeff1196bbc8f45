"""Arithmetic, traffic and expected seconds of each phase of one epoch.

A product of a matrix of P parameters with one token takes 2 P operations, its backward pass twice
that; causal attention over T tokens takes 2 T^2 H D in each layer for scores and values together.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from trace_pl.commands.plan.activations import exchanged
from trace_pl.commands.plan.inputs import Device, Run
from trace_pl.commands.plan.memory import cached_sequences, kv_bytes_per_token
from trace_pl.commands.plan.shapes import ModelShape

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Phase:
    """What one GPU does in one phase of an epoch."""

    name: str
    flops: float
    bytes_read: float = 0.0
    """From and to its own memory, beyond what the products hide."""
    bytes_sent: float = 0.0
    """To other GPUs, or from main memory."""
    compute_s: float = 0.0
    memory_s: float = 0.0
    link_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Transfers to other ranks overlap with arithmetic; own memory does not."""
        return self.memory_s + max(self.compute_s, self.link_s)

    @property
    def limit(self) -> str:
        """What takes longest."""
        parts = {"compute": self.compute_s, "memory": self.memory_s, "link": self.link_s}
        return max(parts, key=parts.__getitem__)


def forward_flops(shape: ModelShape, tokens: float, num_predicted: float, length: float) -> float:
    """Return the operations of a forward pass.

    Args:
        shape: Of the model.
        tokens: Tokens read.
        num_predicted: Tokens that the vocabulary head is applied to.
        length: Tokens of one causal row; each token looks at half of it on average.
    """
    attention = 2 * length * shape.heads * shape.head_dim * shape.layers
    return tokens * (2 * shape.per_token + attention) + num_predicted * 2 * shape.head


def phases_of(run: Run) -> tuple[Phase, ...]:
    """Return the phases of one epoch, in order; tools, tokenising and checkpoints take no time."""
    phases = [push_phase(run), rollout_phase(run)]
    if run.training.has_credit:
        phases.append(credit_phase(run))
    return (*phases, update_phase(run))


def rollout_phase(run: Run) -> Phase:
    """Return the sampling of all rollouts: every token read once, the sampled ones one by one."""
    work, engine, device, shape = run.work, run.engine, run.device, run.shape
    gpus = engine.own_gpus or run.sharding.world
    of_one = engine.own_gpus or engine.gpus_of_one
    of_engine = work.trajectories * of_one / gpus
    flops = forward_flops(shape, work.tokens, work.sampled_tokens, work.tokens)
    cached = cached_sequences(run) * engine.max_model_len / work.tokens
    concurrent = max(1.0, min(of_engine, engine.max_num_seqs, cached))
    steps = work.sampled_tokens * of_engine / concurrent
    step_bytes = _weights_read(shape, concurrent) * engine.param_bytes
    step_bytes += concurrent * work.tokens / 2 * kv_bytes_per_token(shape, engine)
    read = steps * step_bytes / of_one
    total = flops * work.trajectories / gpus
    return Phase(
        "rollout",
        total,
        read,
        compute_s=total / _rate(device, engine.param_bytes),
        memory_s=read / _bandwidth(device, device.memory_tb_s * TERA),
    )


def credit_phase(run: Run) -> Phase:
    """Return the scoring of all boundaries: each trajectory read once, its branches with it."""
    work, shape, sharding = run.work, run.shape, run.sharding
    rows = work.trajectories / sharding.world
    tokens = work.tokens + work.branch_tokens
    flops = rows * forward_flops(shape, tokens, work.branch_tokens, work.tokens)
    forwards = ceil(rows * tokens / run.scored_tokens)
    held = shape.base * sharding.reference_bytes
    sent = forwards * _from_others(run, shape.base, sharding.reference_bytes)
    link_s = sent / _link(run, sharding.shard)
    exchange = 2 * rows * tokens * _exchange(run)
    sent += exchange
    link_s += exchange / _link(run, sharding.expert_parallel)
    if sharding.reference_on_cpu and run.training.has_reference:
        from_host = forwards * held / sharding.shard
        sent += from_host
        link_s += from_host / _bandwidth(run.device, run.device.host_gb_s * GIGA)
    return Phase(
        "credit",
        flops,
        bytes_sent=sent,
        compute_s=flops / _rate(run.device, sharding.param_bytes),
        link_s=link_s,
    )


def update_phase(run: Run) -> Phase:
    """Return all optimizer steps of the epoch, and the old log-probs where they are needed."""
    shape, sharding, training, work = run.shape, run.sharding, run.training, run.work
    trains_all = shape.trained > shape.counts.adapter
    row = forward_flops(shape, work.tokens, work.sampled_tokens, work.tokens)
    is_on_policy = training.num_steps * training.num_passes == 1
    # Forward, gradient of the inputs, gradient of the weights; forward once more.
    passes = training.num_passes * (2 + trains_all + training.has_checkpointing + training.has_kl)
    rows = work.trajectories / sharding.world
    flops = rows * row * (passes + (not is_on_policy))
    steps = training.num_steps * training.num_passes
    # A step takes at least one forward of whole trajectories.
    forwards = steps * ceil(max(1.0, rows / training.num_steps) * work.tokens / run.forward_tokens)
    sent, link_s = _update_traffic(run, forwards, steps)
    # Tokens go and come back in a forward, and their gradients in a backward pass.
    turns = 2 * (2 + training.has_checkpointing) * training.num_passes + 2 * (not is_on_policy)
    exchange = turns * rows * work.tokens * _exchange(run)
    sent += exchange
    link_s += exchange / _link(run, sharding.expert_parallel)
    touched = 2 * (2 * sharding.master_bytes + training.optimizer_bytes)
    read = steps * shape.trained / sharding.shard * touched
    return Phase(
        "update",
        flops,
        read,
        sent,
        compute_s=flops / _rate(run.device, sharding.param_bytes),
        memory_s=read / _bandwidth(run.device, run.device.memory_tb_s * TERA),
        link_s=link_s,
    )


def push_phase(run: Run) -> Phase:
    """Return one copy of the policy's weights into the engine."""
    shape, sharding = run.shape, run.sharding
    held = shape.base * run.engine.param_bytes
    sent = held * (1.0 if run.engine.own_gpus else _others(sharding.shard))
    read = 2 * held
    return Phase(
        "weight push",
        0.0,
        read,
        sent,
        memory_s=read / _bandwidth(run.device, run.device.memory_tb_s * TERA),
        link_s=sent / _link(run, sharding.shard),
    )


def _update_traffic(run: Run, forwards: int, steps: int) -> tuple[float, float]:
    """Return the bytes that one GPU sends for the updates of an epoch, and their seconds."""
    shape, sharding = run.shape, run.sharding
    gradient = shape.trained * sharding.master_bytes
    if sharding.kind == "ddp":
        sent = steps * 2 * gradient * _others(sharding.world)
        return sent, sent / _link(run, sharding.world)
    # Weights are gathered for the forward and again for the backward pass; gradients are summed up
    # among the GPUs of a copy, then among copies.
    weights = 2 * _from_others(run, shape.total, sharding.param_bytes)
    trains_experts = shape.trained > shape.counts.adapter
    inside = forwards * (
        weights + _from_others(run, shape.trained, sharding.master_bytes, trains_experts)
    )
    among = forwards * 2 * gradient / sharding.shard * _others(sharding.num_replicas)
    seconds = inside / _link(run, sharding.shard) + among / _link(run, sharding.world)
    return inside + among, seconds


def _from_others(run: Run, parameters: int, num_bytes: int, has_experts: bool = True) -> float:
    """Return the bytes that one GPU gets to hold parameters whole, or its part of the experts."""
    sharding = run.sharding
    experts = run.shape.counts.experts if has_experts else 0
    dealt = experts / sharding.expert_parallel
    holders = sharding.shard // sharding.expert_parallel  # of the same experts
    whole = (parameters - experts) * _others(sharding.shard) + dealt * _others(holders)
    return whole * num_bytes


def _exchange(run: Run) -> float:
    """Return the bytes that a token sends to experts of other GPUs in all layers, one way."""
    away = _others(run.sharding.expert_parallel)
    return away * exchanged(run.shape, run.sharding.param_bytes) * run.shape.layers


def _weights_read(shape: ModelShape, sequences: float) -> float:
    """Return the parameters that one decoding step of some sequences touches."""
    fixed = shape.base - shape.counts.experts - shape.counts.embedding
    fixed += shape.head if shape.counts.head == 0 else 0
    if not shape.experts:
        return fixed
    missed: float = (1 - shape.top_k / shape.experts) ** sequences
    return fixed + shape.counts.experts * (1 - missed)


def _others(group: int) -> float:
    """Share of a tensor that a member of a ring sends on or gets from the others."""
    return (group - 1) / group


def _link(run: Run, group: int) -> float:
    is_inside = group <= run.sharding.gpus_per_node
    rate = run.device.link_gb_s if is_inside else run.device.network_gb_s
    return _bandwidth(run.device, rate * GIGA)


def _rate(device: Device, num_bytes: int) -> float:
    peak = device.peak_tflops if num_bytes < 4 else device.peak_tflops_fp32
    return peak * TERA * device.utilisation


def _bandwidth(device: Device, peak: float) -> float:
    return peak * device.bandwidth_utilisation
