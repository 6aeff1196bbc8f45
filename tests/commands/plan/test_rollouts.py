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
from trace_pl.commands.plan.rollouts import num_evicted, turns_of
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


def tokens_read_twice(engine):
    """Let trajectories take turns, and return the tokens before each that the cache had lost."""
    rng = random.Random(0)
    rows = [rng.choices(range(5, 300), k=OBSERVED) for _ in range(ALIVE)]
    known, lost = [0] * ALIVE, 0

    def submit(number):
        stream = f"{number}/{len(rows[number])}"
        engine.submit(GenerationRequest(str(number), rows[number], SAMPLED, (), stream))

    for number in range(ALIVE):
        submit(number)
    while engine.has_unfinished():
        for output in engine._step():
            number = int(output.request_id.split("-")[0])
            lost += max(0, known[number] - output.num_cached_tokens)
            rows[number] += output.outputs[0].token_ids
            known[number] = len(rows[number])
            if len(rows[number]) + OBSERVED + SAMPLED <= TOKENS:
                rows[number] += rng.choices(range(5, 300), k=OBSERVED)
                submit(number)
    return lost


def test_a_plan_knows_which_prefixes_vllm_reads_again():
    run = run_of(3.5)
    engine = VLLMEngine(
        resolve_model(BUILT_IN_BASE),
        TOKENS,
        ALIVE,
        kv_cache_gib=run.engine.kv_cache_gib,
        num_threads=1,
    )
    try:
        found = tokens_read_twice(engine)
    finally:
        engine.close()
    planned = ALIVE * sum(turn.prefix for turn in turns_of(run) if turn.is_evicted)
    assert found == pytest.approx(planned, rel=0.1)


def test_trajectories_that_fit_side_by_side_are_read_once():
    assert num_evicted(run_of(8)) == 0
    assert "read again" not in report(run_of(8))
    # 8 x 288 tokens, halfway through the fifth response, are more than 4 x 512.
    assert [turn.is_evicted for turn in turns_of(run_of(4))] == [False] * 4 + [True] * 4
    expected = "It gets 8 at a time, so prefixes leave the cache: those of 4 of 8 responses are"
    assert expected in report(run_of(4))


def test_reading_prefixes_again_and_running_fewer_at_once_takes_time():
    enough, few = (phases_of(run_of(size))[1] for size in (8, 4))
    assert few.compute_s > 2 * enough.compute_s
    assert few.memory_s > enough.memory_s
    # Halfway through the last response 4 x 512 tokens are room for 4.3 trajectories of 480.
    assert turns_of(run_of(4))[-1].concurrent == pytest.approx(4.27, abs=0.01)


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
