"""What to change in a config so that a run fits, with the memory that each change leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from trace_pl.commands.plan.inputs import ADAMW_8BIT_BYTES, GIB, PlannedRun
from trace_pl.commands.plan.memory import cached_sequences, memory_of

_LAST = ("lora", "trainer.num_nodes", "trainer.devices")


@dataclass(frozen=True)
class Remedy:
    """One change of the config."""

    setting: str
    run: PlannedRun
    """The run with the change made."""


def remedies(run: PlannedRun) -> list[Remedy]:
    """Return the changes that save memory, the one that saves most first."""
    now = memory_of(run).total
    found = [r for r in _candidates(run) if memory_of(r.run).total < now - 0.01 * GIB]
    return sorted(found, key=lambda remedy: memory_of(remedy.run).total)


def combination(run: PlannedRun) -> list[Remedy]:
    """Return changes that make room together, each made on top of those before it.

    More GPUs, and changes to what is learnt, come last. The list is empty if nothing suffices.
    """
    chosen: list[Remedy] = []
    while not has_room(run) and len(chosen) < 12:
        left = remedies(run)
        if not left:
            return []
        gentle = [r for r in left if not any(word in r.setting for word in _LAST)]
        chosen.append((gentle or left)[0])
        run = chosen[-1].run
    return chosen if has_room(run) else []


def has_room(run: PlannedRun) -> bool:
    """Return whether everything fits into the memory of a GPU of the trainer."""
    return memory_of(run).total <= run.device.gpu_memory * GIB


def fits(run: PlannedRun) -> bool:
    """Return whether the trainer has room, and the engine's cache for one sequence."""
    return has_room(run) and cached_sequences(run) >= 1.0


def _candidates(run: PlannedRun) -> Iterator[Remedy]:
    yield from _of_training(run)
    yield from _of_sharing(run)
    yield from _of_engine(run)


def _of_training(run: PlannedRun) -> Iterator[Remedy]:
    training, shape = run.training, run.shape
    yield Remedy(
        "model.activation_checkpointing: true",
        replace(run, training=replace(training, has_checkpointing=True)),
    )
    if training.tokens_per_forward > run.work.tokens:
        yield Remedy(
            f"data.tokens_per_forward: {run.work.tokens}",
            replace(run, training=replace(training, tokens_per_forward=run.work.tokens)),
        )
    if shape.trained == shape.total:
        yield Remedy(
            "--config configs/options/adamw_8bit.yaml",
            replace(run, training=replace(training, optimizer_bytes=ADAMW_8BIT_BYTES)),
        )
        # Rank 16 on all linear layers trains well below a hundredth of the parameters.
        yield Remedy(
            "--config configs/options/lora.yaml (trains another thing)",
            replace(
                run,
                shape=replace(shape, trained=shape.total // 100),
                training=replace(training, has_reference=False),
            ),
        )


def _of_sharing(run: PlannedRun) -> Iterator[Remedy]:
    sharding = run.sharding
    if sharding.kind != "sharded" and sharding.world > 1:
        shared = replace(
            sharding,
            kind="sharded",
            shard=sharding.world,
            param_bytes=2,
            has_buckets=False,
            is_autocast=False,
        )
        note = " (computes in bfloat16)" if sharding.param_bytes == 4 else ""
        yield Remedy(f"--config configs/strategy/fsdp.yaml{note}", replace(run, sharding=shared))
    if sharding.kind == "sharded" and sharding.shard < sharding.world:
        yield Remedy(
            "trainer.strategy.init_args.shard_size: null",
            replace(run, sharding=replace(sharding, shard=sharding.world)),
        )
    if sharding.kind == "sharded" and sharding.expert_parallel == 1 and run.shape.experts:
        size = gcd(run.shape.experts, sharding.shard, sharding.gpus_per_node)
        yield Remedy(
            f"trainer.strategy.init_args.expert_parallel_size: {size}",
            replace(run, sharding=replace(sharding, expert_parallel=size)),
        )
    if sharding.kind == "sharded" and run.training.has_reference:
        yield Remedy(
            "trainer.strategy.init_args.reference_on_cpu: true",
            replace(run, sharding=replace(sharding, reference_on_cpu=True)),
        )
    if sharding.kind == "sharded" and sharding.shard == sharding.world:
        yield _more_gpus(run)


def _more_gpus(run: PlannedRun) -> Remedy:
    """Return twice the GPUs: on the node while it has them, then on twice the nodes."""
    sharding = run.sharding
    world = 2 * sharding.world
    setting = f"trainer.devices: {world}"
    if world > sharding.gpus_per_node:
        per_node = min(sharding.world, sharding.gpus_per_node)
        setting = f"trainer.num_nodes: {-(-world // per_node)} ({world} GPUs)"
    return Remedy(setting, replace(run, sharding=replace(sharding, world=world, shard=world)))


def _of_engine(run: PlannedRun) -> Iterator[Remedy]:
    engine = run.engine
    if engine.own_gpus:
        return
    key = "data.engine.init_args"
    if engine.param_bytes == 4:
        smaller = replace(engine, param_bytes=2)
        yield Remedy(f"{key}.dtype: bfloat16", replace(run, engine=smaller))
    if cached_sequences(run) < 2.0:
        return
    if engine.kv_cache_gib is not None:
        half = engine.kv_cache_gib / 2
        yield Remedy(
            f"{key}.kv_cache_gib: {half:g}", replace(run, engine=replace(engine, kv_cache_gib=half))
        )
    else:
        share = round(engine.share * 0.8, 2)
        yield Remedy(
            f"{key}.gpu_memory_utilization: {share:g}",
            replace(run, engine=replace(engine, share=share)),
        )
