"""Expected seconds of each phase of one epoch, from its arithmetic and its traffic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from trace_pl.commands.plan.flops import forward_flops, weights_read
from trace_pl.commands.plan.inputs import PlannedRun
from trace_pl.commands.plan.memory import kv_bytes_per_token
from trace_pl.commands.plan.rollouts import reads_twice, rollouts_of_one, rounds_of
from trace_pl.commands.plan.traffic import (
    GIGA,
    TERA,
    Transfer,
    among_ranks,
    compute_rate,
    expert_exchange,
    from_main_memory,
    from_others,
    others,
    reached,
    update_traffic,
)

_LIMITS = ("compute", "memory", "link", "files")


@dataclass(frozen=True)
class PhaseCost:
    """What one GPU does in one phase of an epoch."""

    name: str
    flops: float
    bytes_read: float
    """From and to its own memory, beyond what the products hide."""
    bytes_sent: float
    """To other GPUs, or from main memory."""
    compute_s: float
    memory_s: float
    link_s: float
    files_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Transfers to other ranks overlap with arithmetic; own memory and files do not."""
        return self.memory_s + self.files_s + max(self.compute_s, self.link_s)

    @property
    def limit(self) -> str:
        """What takes longest."""
        parts = {name: getattr(self, f"{name}_s") for name in _LIMITS}
        return max(parts, key=parts.__getitem__)


def phases_of(run: PlannedRun) -> tuple[PhaseCost, ...]:
    """Return the phases of one epoch, in order; tools, tokenising and checkpoints take no time."""
    phases = [push_phase(run), rollout_phase(run)]
    if run.training.has_credit:
        phases.append(credit_phase(run))
    return (*phases, update_phase(run))


def push_phase(run: PlannedRun) -> PhaseCost:
    """Return one copy of the policy's weights into the engine: read, sent and written.

    On their way through files, one file is written and read at a time.
    """
    held = run.shape.base * run.engine.param_bytes
    share = 1.0 if run.engine.own_gpus else others(run.sharding.shard)
    sent = among_ranks(run, held * share, run.sharding.shard)
    files_s = held / (run.device.file_gb_s * GIGA) if run.engine.pushes_files else 0.0
    return replace(_phase(run, "weight push", read=2 * held, sent=sent), files_s=files_s)


def rollout_phase(run: PlannedRun) -> PhaseCost:
    """Return the sampling of all rollouts: each token is read, the sampled ones one by one.

    Trajectories that the cache has no room for are read twice.
    """
    work, engine, shape = run.work, run.engine, run.shape
    row = forward_flops(shape, work.tokens, work.sampled_tokens, work.tokens)
    if reads_twice(run):
        row += forward_flops(shape, work.tokens, 0, work.tokens)
    read = 0.0
    for each in rounds_of(run):
        weights = weights_read(shape, each.concurrent) * engine.param_bytes / engine.gpus_of_one
        read += weights + each.tokens * kv_bytes_per_token(shape, engine)
    steps_of_a_round = work.sampled_tokens / (work.turns + 1)
    return _phase(
        run,
        "rollout",
        flops=row * rollouts_of_one(run) / engine.gpus_of_one,
        number_bytes=engine.param_bytes,
        read=read * steps_of_a_round,
    )


def credit_phase(run: PlannedRun) -> PhaseCost:
    """Return the scoring of all boundaries: each trajectory read once, its branches with it."""
    work, shape, sharding = run.work, run.shape, run.sharding
    rows = work.trajectories / sharding.world
    tokens = work.tokens + work.branch_tokens
    forwards = ceil(rows * tokens / run.scored_tokens)
    gathered = forwards * from_others(run, shape.base, sharding.reference_bytes)
    sent = among_ranks(run, gathered, sharding.shard)
    sent += expert_exchange(run, rows * tokens, turns=2)
    if sharding.reference_on_cpu and run.training.has_reference:
        own_part = shape.base * sharding.reference_bytes / sharding.shard
        sent += from_main_memory(run, forwards * own_part)
    return _phase(
        run,
        "credit",
        flops=rows * forward_flops(shape, tokens, work.branch_tokens, work.tokens),
        number_bytes=sharding.param_bytes,
        sent=sent,
    )


def update_phase(run: PlannedRun) -> PhaseCost:
    """Return all optimizer steps of the epoch, and the old log-probs where they are needed."""
    shape, sharding, training, work = run.shape, run.sharding, run.training, run.work
    rows = work.trajectories / sharding.world
    steps = training.num_steps * training.num_passes
    # A step takes at least one forward of whole trajectories.
    rows_of_step = max(1.0, rows / training.num_steps)
    forwards = steps * ceil(rows_of_step * work.tokens / run.forward_tokens)
    # Tokens go to experts and come back in a forward, and their gradients in a backward pass.
    turns = 2 * training.num_passes * (2 + training.has_checkpointing)
    turns += 2 * _reads_old_logprobs(run)
    # Parameters, gradients and the optimizer's state are read and written.
    touched = 2 * (2 * sharding.master_bytes + training.optimizer_bytes)
    return _phase(
        run,
        "update",
        flops=rows * _update_flops(run),
        number_bytes=sharding.param_bytes,
        read=steps * shape.trained / sharding.shard * touched,
        sent=update_traffic(run, forwards, steps)
        + expert_exchange(run, rows * work.tokens, turns=turns),
    )


def _update_flops(run: PlannedRun) -> float:
    """Return the operations of all passes over one trajectory."""
    work, training, shape = run.work, run.training, run.shape
    trains_all = shape.trained > shape.counts.adapter
    # Forward, gradient of the inputs, gradient of the weights; forward once more.
    of_a_pass = 2 + trains_all + training.has_checkpointing + training.has_kl
    forwards = training.num_passes * of_a_pass + _reads_old_logprobs(run)
    return forwards * forward_flops(shape, work.tokens, work.sampled_tokens, work.tokens)


def _reads_old_logprobs(run: PlannedRun) -> bool:
    """Whether a second step moves away from the policy that sampled."""
    return run.training.num_steps * run.training.num_passes > 1


def _phase(
    run: PlannedRun,
    name: str,
    flops: float = 0.0,
    number_bytes: int = 2,
    read: float = 0.0,
    sent: Transfer | None = None,
) -> PhaseCost:
    """Return a phase with its seconds; ``number_bytes`` are those of a number of its products."""
    device, sent = run.device, sent or Transfer()
    return PhaseCost(
        name,
        flops,
        read,
        sent.num_bytes,
        compute_s=flops / compute_rate(device, number_bytes),
        memory_s=read / reached(device, device.memory_tb_s * TERA),
        link_s=sent.seconds,
    )
