"""A plan as text."""

from __future__ import annotations

from dataclasses import fields

from trace_pl.commands.plan.inputs import GIB, PlannedRun
from trace_pl.commands.plan.memory import Memory, cached_sequences, kv_bytes_per_token, memory_of
from trace_pl.commands.plan.phases import phases_of
from trace_pl.commands.plan.remedies import combination, fits, has_room, remedies
from trace_pl.commands.plan.rollouts import reads_twice, rollouts_of_one
from trace_pl.commands.plan.traffic import GIGA, TERA


def report(run: PlannedRun) -> str:
    """Return the whole plan: memory, phases, and what to change if it does not fit."""
    parts = [_headline(run), memory_table(run), phase_table(run)]
    if not fits(run):
        parts.append(advice(run))
    return "\n\n".join(parts)


def memory_table(run: PlannedRun) -> str:
    """Return the memory of one GPU by kind, and whether it fits."""
    memory = memory_of(run)
    rows = [(f.name.replace("_", " "), getattr(memory, f.name)) for f in fields(Memory)]
    lines = [f"{'memory of one GPU':<18}{'GiB':>8}"]
    lines += [f"{name:<18}{size / GIB:>8.2f}" for name, size in rows]
    capacity = run.device.gpu_memory
    free = capacity - memory.total / GIB
    verdict = f"fits, {free:.1f} free" if free >= 0 else f"DOES NOT FIT, {-free:.1f} too much"
    lines.append(f"{'total':<18}{memory.total / GIB:>8.2f}  of {capacity:g}: {verdict}")
    lines.append(_cache_line(run))
    if reads_twice(run):
        lines.append(
            f"It has {rollouts_of_one(run):g} to sample: the oldest keep their room, the others "
            "wait and are read again."
        )
    if run.sharding.reference_on_cpu and run.training.has_reference:
        held = run.shape.base * run.sharding.reference_bytes / run.sharding.shard / GIB
        lines.append(f"The reference takes {held:.1f} GiB of main memory for each GPU.")
    return "\n".join(lines)


def _cache_line(run: PlannedRun) -> str:
    engine, sequences = run.engine, cached_sequences(run)
    count = engine.own_gpus // engine.gpus_of_one
    who = "The engine" if count < 2 else f"Each of {count} engines"
    if engine.own_gpus:
        who += f" on {engine.own_gpus} GPUs of {'its' if count < 2 else 'their'} own"
    held = f"{who} keeps {sequences:.1f} sequences of {engine.max_model_len} tokens"
    return held + ("." if sequences >= 1.0 else ": TOO FEW to run.")


def phase_table(run: PlannedRun) -> str:
    """Return what each phase of an epoch costs one GPU, and the seconds it should take."""
    lines = [f"{'phase':<12}{'TFLOP':>10}{'GB moved':>10}{'GB sent':>10}{'seconds':>10}  limit"]
    phases = phases_of(run)
    for p in phases:
        lines.append(
            f"{p.name:<12}{p.flops / TERA:>10.1f}{p.bytes_read / GIGA:>10.1f}"
            f"{p.bytes_sent / GIGA:>10.1f}{p.seconds:>10.1f}  {p.limit}"
        )
    total = sum(p.seconds for p in phases)
    tokens = run.work.trajectories * run.work.tokens
    lines.append(
        f"{'epoch':<12}{'':>30}{total:>10.1f}  {tokens / total:.0f} tokens/s in all, "
        f"{update_rate(run):.0f} in the update"
    )
    return "\n".join(lines)


def update_rate(run: PlannedRun) -> float:
    """Return the tokens that all GPUs train on in a second of the update."""
    seconds = next(p.seconds for p in phases_of(run) if p.name == "update")
    return run.work.trajectories * run.work.tokens * run.training.num_passes / seconds


def advice(run: PlannedRun) -> str:
    """Return the settings that save memory, and some that suffice together."""
    lines = []
    if cached_sequences(run) < 1.0:
        engine = run.engine
        least = kv_bytes_per_token(run.shape, engine) * engine.max_model_len
        lines.append(
            f"One sequence of {engine.max_model_len} tokens takes {least / GIB:.2f} GiB of cache: "
            "raise data.engine.init_args.kv_cache_gib (or gpu_memory_utilization), or lower "
            "max_model_len."
        )
    if has_room(run):
        return "\n".join(lines)
    lines.append("One change alone would leave:")
    for remedy in remedies(run):
        lines.append(f"  {memory_of(remedy.run).total / GIB:>7.1f} GiB  {remedy.setting}")
    together = combination(run)
    if together:
        left = memory_of(together[-1].run).total / GIB
        lines.append(f"These together fit, with {left:.1f} GiB:")
        lines += [f"  {remedy.setting}" for remedy in together]
    else:
        lines.append("No combination of them fits: take GPUs with more memory, a smaller model, or")
        lines.append("an engine on GPUs of its own.")
    return "\n".join(lines)


def _headline(run: PlannedRun) -> str:
    shape, sharding, work = run.shape, run.sharding, run.work
    how = {
        "single": "one GPU",
        "ddp": f"{sharding.world} GPUs, a copy on each",
        "sharded": f"{sharding.world} GPUs, {sharding.shard} share a copy",
    }[sharding.kind]
    if sharding.expert_parallel > 1:
        how += f", {sharding.expert_parallel} divide the experts"
    return (
        f"{shape.name}: {_count(shape.base)} parameters, {_count(shape.active)} active, "
        f"{_count(shape.trained)} trained; {how}.\n"
        f"An epoch: {work.trajectories} trajectories of {work.tokens} tokens, "
        f"{work.sampled_tokens} of them sampled, {work.turns} tool turns."
    )


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"
