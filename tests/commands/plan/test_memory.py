"""The plan's weights, gradients and optimizer against those of real trainers."""

import json
from dataclasses import replace

import plan_ranks
import pytest
import torch
from fixed_experience import train
from lightning.pytorch.callbacks import Callback
from measured_bytes import storage_bytes
from processes import Ranks
from wide_models import make_wide, make_wide_moe

from trace_pl.commands.plan.inputs import GIB, Engine, PlannedRun, Sharding, Training, Workload
from trace_pl.commands.plan.memory import memory_of
from trace_pl.commands.plan.shapes import read_shape, shape_of
from trace_pl.models.adapters import LoRA

WORK = Workload(trajectories=10, tokens=30, sampled_tokens=10, turns=3)


class Held(Callback):
    """Bytes of every kind once an optimizer step was taken."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradients = [p.grad for p in pl_module.policy.parameters() if p.grad is not None]
        self.gradients = storage_bytes(gradients)

    def on_train_end(self, trainer, pl_module):
        states = trainer.optimizers[0].state.values()
        self.weights = storage_bytes(pl_module.policy.parameters())
        self.optimizer = storage_bytes(x for s in states for x in s.values() if x.numel() > 1)
        self.reference = sum(storage_bytes(m.parameters()) for m in pl_module._reference)


@pytest.mark.parametrize("adapter", [None, LoRA(rank=4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plan_knows_what_a_trainer_holds(tiny_model_dir, dtype, adapter):
    held = Held()
    settings = {"optimizer": torch.optim.AdamW, "dtype": dtype, "adapter": adapter}
    train(tiny_model_dir, callbacks=[held], model=settings)
    size = getattr(torch, dtype).itemsize
    plan = memory_of(
        PlannedRun(
            read_shape(str(tiny_model_dir), adapter),
            Sharding(master_bytes=size, param_bytes=size),
            Training(optimizer_bytes=2 * size, has_reference=adapter is None),
            Engine(),
            WORK,
        )
    )
    assert plan.weights == held.weights
    assert plan.gradients == held.gradients
    assert plan.optimizer == held.optimizer
    assert plan.reference == held.reference


def sharing(kind):
    if kind == "ddp":
        return Sharding(kind, world=2, has_buckets=True)
    return Sharding("sharded", 2, shard=2, param_bytes=2, expert_parallel=1 + (kind == "experts"))


JOBS = {
    "ddp": ("ddp", {}, [300, 200]),
    "sharded": ("sharded", {}, [300, 200]),
    "few words": ("sharded", {"vocab_size": 64}, [12, 12]),  # hardly more than gathered layers
    "experts": ("experts", {}, [700, 500]),
}


@pytest.fixture(scope="module")
def two_ranks():
    """What one of two ranks holds, by job."""
    output = Ranks(2, plan_ranks.main, list(JOBS.values())).finish()
    return dict(zip(JOBS, json.loads(output.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("job", JOBS)
def test_a_plan_knows_what_each_of_two_ranks_holds(two_ranks, job):
    kind, changes, lengths = JOBS[job]
    held = two_ranks[job]
    model = (make_wide_moe if kind == "experts" else make_wide)(**changes)
    predicted = sum(lengths) - 8 * len(lengths)
    plan = memory_of(
        PlannedRun(
            shape_of(model),
            sharing(kind),
            Training(has_checkpointing=True, tokens_per_forward=1, has_credit=False),
            Engine(),
            Workload(2, sum(lengths), predicted, turns=3),
        )
    )
    assert plan.weights == held["weights"]
    assert plan.gradients == held["gradients"]
    assert plan.optimizer == held["optimizer"]
    moving = held["activations and buffers"]
    assert plan.activations + plan.buffers == pytest.approx(moving, rel=0.15)


def test_a_reference_on_cpu_and_an_engine_of_its_own_take_nothing():
    shape = shape_of(make_wide())
    run = PlannedRun(shape, sharing("sharded"), Training(), Engine(kv_cache_gib=0.5), WORK)
    here = memory_of(run)
    assert here.reference == 2 * shape.total / 2
    assert here.engine_weights == 2 * shape.total
    assert here.kv_cache == 0.5 * GIB
    away = memory_of(
        replace(
            run,
            sharding=replace(run.sharding, reference_on_cpu=True),
            engine=replace(run.engine, own_gpus=2),
        )
    )
    assert away.reference == away.engine_weights == away.kv_cache == 0.0


def test_copies_on_every_node_are_shared_within_it():
    shape = shape_of(make_wide())
    sharding = Sharding("sharded", world=16, shard=8, param_bytes=2)
    plan = memory_of(PlannedRun(shape, sharding, Training(), Engine(), WORK))
    assert plan.weights == 4 * shape.total / 8
    assert sharding.num_replicas == 2
