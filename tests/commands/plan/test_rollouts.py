"""The plan's count of what an engine reads twice, against vLLM's own cache."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from vllm.config import ModelConfig
from wide_models import make_wide

from trace_pl.commands.plan.inputs import (
    GIB,
    Device,
    Engine,
    PlannedRun,
    Sharding,
    Training,
    Workload,
)
from trace_pl.commands.plan.memory import cached_sequences, kv_bytes_per_token
from trace_pl.commands.plan.phases import phases_of
from trace_pl.commands.plan.report import report
from trace_pl.commands.plan.rollouts import Round, reads_twice, rounds_of
from trace_pl.commands.plan.shapes import read_shape, shape_of
from trace_pl.engines.protocol import GenerationRequest
from trace_pl.engines.vllm.engine import VLLMEngine
from trace_pl.models.names import BUILT_IN_BASE, resolve_model

ALIVE, RESPONSES, SAMPLED, OBSERVED = 8, 8, 16, 48
TOKENS = RESPONSES * (SAMPLED + OBSERVED)


def run_of(num_cached, **engine):
    """Return rollouts of the base model with a cache for so many whole trajectories."""
    shape = read_shape(BUILT_IN_BASE)
    per_token = kv_bytes_per_token(shape, Engine(param_bytes=4))
    settings = {
        "param_bytes": 4,
        "kv_cache_gib": num_cached and num_cached * TOKENS * per_token / GIB,
        "max_model_len": TOKENS,
    }
    work = Workload(ALIVE, TOKENS, RESPONSES * SAMPLED, RESPONSES - 1)
    return PlannedRun(shape, Sharding(), Training(), Engine(**{**settings, **engine}), work)


def sample_in_turns(engine):
    """Let trajectories take turns; return the tokens that the cache had lost, and the steps."""
    rng = random.Random(0)
    rows = [rng.choices(range(5, 300), k=OBSERVED) for _ in range(ALIVE)]
    known, lost, steps = [0] * ALIVE, 0, 0

    def submit(number):
        stream = f"{number}/{len(rows[number])}"
        engine.submit(GenerationRequest(str(number), rows[number], SAMPLED, (), stream, number))

    for number in range(ALIVE):
        submit(number)
    while engine.has_unfinished():
        steps += 1
        for output in engine._step():
            number = int(output.request_id.split("-")[0])
            lost += max(0, known[number] - output.num_cached_tokens)
            rows[number] += output.outputs[0].token_ids
            known[number] = len(rows[number])
            if len(rows[number]) + OBSERVED + SAMPLED <= TOKENS:
                rows[number] += rng.choices(range(5, 300), k=OBSERVED)
                submit(number)
    return lost, steps


def test_a_plan_knows_how_vllm_samples_more_than_its_cache_holds():
    run = run_of(3.5)
    cache = run.engine.kv_cache_gib
    engine = VLLMEngine(
        resolve_model(BUILT_IN_BASE), TOKENS, ALIVE, kv_cache_gib=cache, num_threads=1
    )
    try:
        lost, steps = sample_in_turns(engine)
    finally:
        engine.close()
    # First come, first served would read every prefix again: 3.5 times as many tokens as there are.
    assert reads_twice(run)
    assert lost == pytest.approx(ALIVE * TOKENS, rel=0.3)
    assert steps == pytest.approx(len(rounds_of(run)) * SAMPLED, rel=0.15)


def test_trajectories_that_fit_side_by_side_are_read_once():
    assert not reads_twice(run_of(8))
    assert "read again" not in report(run_of(8))
    assert rounds_of(run_of(8)) == [Round(8, 8 * (64 * turn + 32)) for turn in range(8)]
    assert reads_twice(run_of(4))
    assert "It has 8 to sample: the oldest keep their room, the others wait" in report(run_of(4))


def test_the_oldest_are_sampled_first_and_those_without_room_wait():
    # 8 trajectories of 512 tokens, room for 4 x 512: up to 256 tokens each all are sampled.
    rounds = rounds_of(run_of(4))
    assert [each.concurrent for each in rounds] == [8, 8, 8, 8, 6, 5, 4, 4, 4, 4, 3, 2]
    assert sum(each.concurrent for each in rounds) == ALIVE * RESPONSES
    few = rounds_of(run_of(8, max_num_seqs=2))
    assert [each.concurrent for each in few] == [2] * 32


def test_reading_twice_and_running_fewer_at_once_takes_time():
    enough, few = (phases_of(run_of(size))[1] for size in (8, 4))
    assert few.compute_s == pytest.approx(2 * enough.compute_s, rel=0.1)
    assert few.memory_s > enough.memory_s


def test_a_key_value_head_is_held_by_every_gpu_beyond_their_number():
    shape = shape_of(make_wide(num_key_value_heads=4))
    held = [kv_bytes_per_token(shape, Engine(gpus_of_one=gpus)) for gpus in (1, 2, 4, 8)]
    assert held == [4 * held[2], 2 * held[2], held[2], held[2]]
    vllm = SimpleNamespace(use_mla=False, model_arch_config=SimpleNamespace(total_num_kv_heads=4))
    for gpus, heads in ((1, 4), (2, 2), (4, 1), (8, 1)):
        parallel = SimpleNamespace(tensor_parallel_size=gpus)
        assert ModelConfig.get_num_kv_heads(vllm, parallel) == heads


def test_more_servers_on_the_same_gpus_hold_fewer_copies_of_the_heads():
    shape = shape_of(make_wide(num_key_value_heads=4))
    one = replace(run_of(8, kv_cache_gib=None, own_gpus=8, gpus_of_one=8), shape=shape)
    two = replace(one, engine=replace(one.engine, gpus_of_one=4))
    assert 2 * cached_sequences(two) == pytest.approx(2 * cached_sequences(one), rel=0.01)
    said = f"Each of 2 engines on 8 GPUs of their own keeps {cached_sequences(two):.1f} sequences"
    assert said in report(two)


def test_a_push_through_files_takes_as_long_as_its_files():
    run = replace(run_of(8, pushes_files=True), device=Device(file_gb_s=0.001))
    push = phases_of(run)[0]
    assert push.files_s == pytest.approx(4 * run.shape.base / 1e6)
    assert (push.limit, push.seconds > push.files_s) == ("files", True)
    assert phases_of(replace(run, engine=replace(run.engine, pushes_files=False)))[0].files_s == 0
