"""Expected seconds of each phase of one epoch, from its arithmetic and its traffic."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from trace_pl.commands.plan.flops import forward_flops, weights_read
from trace_pl.commands.plan.inputs import PlannedRun
from trace_pl.commands.plan.memory import cached_sequences, kv_bytes_per_token
from trace_pl.commands.plan.traffic import (
    GIGA,
    TERA,
    compute_rate,
    exchange_bytes,
    from_others,
    link_rate,
    others,
    reached,
    update_traffic,
)


@dataclass(frozen=True)
class PhaseCost:
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


def phases_of(run: PlannedRun) -> tuple[PhaseCost, ...]:
    """Return the phases of one epoch, in order; tools, tokenising and checkpoints take no time."""
    phases = [push_phase(run), rollout_phase(run)]
    if run.training.has_credit:
        phases.append(credit_phase(run))
    return (*phases, update_phase(run))


def rollout_phase(run: PlannedRun) -> PhaseCost:
    """Return the sampling of all rollouts: every token read once, the sampled ones one by one."""
    work, engine, device, shape = run.work, run.engine, run.device, run.shape
    gpus = engine.own_gpus or run.sharding.world
    of_one = engine.own_gpus or engine.gpus_of_one
    of_engine = work.trajectories * of_one / gpus
    flops = forward_flops(shape, work.tokens, work.sampled_tokens, work.tokens)
    cached = cached_sequences(run) * engine.max_model_len / work.tokens
    concurrent = max(1.0, min(of_engine, engine.max_num_seqs, cached))
    steps = work.sampled_tokens * of_engine / concurrent
    step_bytes = weights_read(shape, concurrent) * engine.param_bytes
    step_bytes += concurrent * work.tokens / 2 * kv_bytes_per_token(shape, engine)
    read = steps * step_bytes / of_one
    total = flops * work.trajectories / gpus
    return PhaseCost(
        "rollout",
        total,
        read,
        compute_s=total / compute_rate(device, engine.param_bytes),
        memory_s=read / reached(device, device.memory_tb_s * TERA),
    )


def credit_phase(run: PlannedRun) -> PhaseCost:
    """Return the scoring of all boundaries: each trajectory read once, its branches with it."""
    work, shape, sharding = run.work, run.shape, run.sharding
    rows = work.trajectories / sharding.world
    tokens = work.tokens + work.branch_tokens
    flops = rows * forward_flops(shape, tokens, work.branch_tokens, work.tokens)
    forwards = ceil(rows * tokens / run.scored_tokens)
    held = shape.base * sharding.reference_bytes
    sent = forwards * from_others(run, shape.base, sharding.reference_bytes)
    link_s = sent / link_rate(run, sharding.shard)
    exchange = 2 * rows * tokens * exchange_bytes(run)
    sent += exchange
    link_s += exchange / link_rate(run, sharding.expert_parallel)
    if sharding.reference_on_cpu and run.training.has_reference:
        from_host = forwards * held / sharding.shard
        sent += from_host
        link_s += from_host / reached(run.device, run.device.host_gb_s * GIGA)
    return PhaseCost(
        "credit",
        flops,
        bytes_sent=sent,
        compute_s=flops / compute_rate(run.device, sharding.param_bytes),
        link_s=link_s,
    )


def update_phase(run: PlannedRun) -> PhaseCost:
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
    sent, link_s = update_traffic(run, forwards, steps)
    # Tokens go and come back in a forward, and their gradients in a backward pass.
    turns = 2 * (2 + training.has_checkpointing) * training.num_passes + 2 * (not is_on_policy)
    exchange = turns * rows * work.tokens * exchange_bytes(run)
    sent += exchange
    link_s += exchange / link_rate(run, sharding.expert_parallel)
    touched = 2 * (2 * sharding.master_bytes + training.optimizer_bytes)
    read = steps * shape.trained / sharding.shard * touched
    return PhaseCost(
        "update",
        flops,
        read,
        sent,
        compute_s=flops / compute_rate(run.device, sharding.param_bytes),
        memory_s=read / reached(run.device, run.device.memory_tb_s * TERA),
        link_s=link_s,
    )


def push_phase(run: PlannedRun) -> PhaseCost:
    """Return one copy of the policy's weights into the engine."""
    shape, sharding = run.shape, run.sharding
    held = shape.base * run.engine.param_bytes
    sent = held * (1.0 if run.engine.own_gpus else others(sharding.shard))
    read = 2 * held
    return PhaseCost(
        "weight push",
        0.0,
        read,
        sent,
        memory_s=read / reached(run.device, run.device.memory_tb_s * TERA),
        link_s=sent / link_rate(run, sharding.shard),
    )
