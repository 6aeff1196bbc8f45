"""Closing an engine inside a process that trains."""

import torch
from processes import Ranks, Run
from torch import distributed

from trace_pl.engines.vllm.engine import VLLMEngine
from trace_pl.models.names import BUILT_IN_BASE, resolve_model


def make_engine() -> VLLMEngine:
    return VLLMEngine(
        resolve_model(BUILT_IN_BASE), max_model_len=256, max_num_seqs=4, kv_cache_gib=0.05
    )


def close_and_sum() -> None:
    """Make and close an engine in a rank of a group, then add numbers up with the other rank."""
    distributed.init_process_group("gloo")
    engine = make_engine()
    engine.close()
    engine.close()
    number = torch.tensor(distributed.get_rank() + 1.0)
    distributed.all_reduce(number)
    assert number == 3.0
    second = make_engine()  # vLLM has forgotten its own groups, so another one can begin
    second.close()
    distributed.all_reduce(number)
    assert number == 6.0
    distributed.destroy_process_group()


def close_alone() -> None:
    """Make and close an engine where there is no group."""
    engine = make_engine()
    assert distributed.is_initialized()
    engine.close()
    assert not distributed.is_initialized()


def test_a_group_that_others_made_outlives_the_engine():
    Ranks(2, close_and_sum).finish()


def test_a_group_that_vllm_made_goes_with_it():
    run = Run(close_alone)
    run.finish()
