"""What the plan counts without numbers against what the trainer's own forward and backward hold."""

import pytest
import torch
from measured_bytes import backward_peak, rows, saved_bytes
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache
from wide_models import make_wide, make_wide_llama, make_wide_moe

from trace_pl.commands.plan.activations import scoring_pass, training_passes
from trace_pl.commands.plan.flops import forward_flops
from trace_pl.commands.plan.inputs import Engine
from trace_pl.commands.plan.live_bytes import LiveBytes
from trace_pl.commands.plan.memory import kv_bytes_per_token
from trace_pl.commands.plan.shapes import shape_of
from trace_pl.commands.plan.token_bytes import UnknownMemory, forward_bytes
from trace_pl.models.adapters import LoRA
from trace_pl.models.logprobs import sampled_logprobs
from trace_pl.probes import Branch, ProbeRequest
from trace_pl.scoring import BranchedScorer

LENGTHS = [400, 300, 200]
KINDS = {
    "mixture": make_wide_moe,
    "bfloat16": lambda: make_wide().bfloat16(),  # most is alive in the head
    "few words": lambda: make_wide(vocab_size=64),  # in the layers
    "mixture of few words": lambda: make_wide_moe(vocab_size=64),
}


def plan_of(model, mask, has_checkpointing):
    num_bytes = model.dtype.itemsize
    # The last token of a row is predicted and not read.
    tokens = sum(LENGTHS) - len(LENGTHS)
    return training_passes(shape_of(model), num_bytes, tokens, int(mask.sum()), has_checkpointing)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_knows_what_a_forward_pass_keeps(kind):
    model = KINDS[kind]()
    ids, mask = rows(model.config.vocab_size, LENGTHS)
    plan = plan_of(model, mask, has_checkpointing=False)
    assert plan.saved == pytest.approx(saved_bytes(model, ids, mask), rel=0.001)
    assert plan.peak == pytest.approx(backward_peak(model, ids, mask), rel=0.001)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_knows_what_checkpointing_leaves(kind):
    model = KINDS[kind]()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, mask = rows(model.config.vocab_size, LENGTHS)
    plan = plan_of(model, mask, has_checkpointing=True)
    assert plan.saved == pytest.approx(saved_bytes(model, ids, mask), rel=0.003)
    assert plan.peak == pytest.approx(backward_peak(model, ids, mask), rel=0.01)


@pytest.mark.parametrize("has_checkpointing", [False, True])
def test_a_plan_knows_what_an_adapter_keeps(has_checkpointing):
    model, adapter = make_wide(vocab_size=64), LoRA(rank=4)
    adapter.attach(model)
    if has_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, mask = rows(64, LENGTHS)
    tokens = sum(LENGTHS) - len(LENGTHS)
    shape = shape_of(model, adapter=adapter)
    plan = training_passes(shape, 4, tokens, int(mask.sum()), has_checkpointing)
    assert plan.saved == pytest.approx(saved_bytes(model, ids, mask), rel=0.01)
    assert plan.peak == pytest.approx(backward_peak(model, ids, mask), rel=0.02)


def test_a_model_that_needs_numbers_to_run_is_said_to_be_unknown():
    model = make_wide_moe()
    model.config._experts_implementation = "eager"  # asks each expert whether it has tokens
    with pytest.raises(UnknownMemory, match="counted, got 'qwen3_moe', which does not run"):
        forward_bytes(shape_of(model).blueprint, 4)


@pytest.mark.parametrize("has_checkpointing", [False, True])
def test_a_plan_knows_the_casts_of_mixed_precision(has_checkpointing):
    model = make_wide_moe()
    if has_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, mask = rows(model.config.vocab_size, LENGTHS)
    with torch.autocast("cpu", torch.bfloat16):
        held = backward_peak(model, ids, mask)
    shape, tokens = shape_of(model), sum(LENGTHS) - len(LENGTHS)
    plan = training_passes(shape, 2, tokens, int(mask.sum()), has_checkpointing, True)
    casts = 2 * shape.cast  # made once and kept
    assert plan.peak + casts == pytest.approx(held, rel=0.02)


def test_a_plan_knows_the_chunks_of_a_large_vocabulary():
    model = make_wide(vocab_size=50_000, num_hidden_layers=1)
    ids, mask = rows(50_000, [300])  # more than one chunk of logits
    plan = training_passes(shape_of(model), 4, 299, int(mask.sum()), False, device_type="cpu")
    gradient = 4 * shape_of(model).head  # of the head, beside the sum it is added to
    assert plan.peak + gradient == pytest.approx(backward_peak(model, ids, mask), rel=0.001)


@pytest.mark.parametrize("make", [make_wide, make_wide_moe])
def test_a_plan_knows_what_scoring_holds(make):
    model = make().eval()
    branch = Branch(tuple(range(5)), tuple(range(6)))
    ends = tuple(range(100, 601, 50))
    requests = [ProbeRequest("r", torch.arange(600) % 60, ends, (branch,)) for _ in range(2)]
    num_branch_tokens = len(ends) * 10
    with LiveBytes() as live:
        BranchedScorer(model).score(requests)
    tokens = 2 * (600 + num_branch_tokens)
    plan = scoring_pass(shape_of(model), model.dtype.itemsize, tokens, 600, num_branch_tokens)
    assert plan == pytest.approx(live.peak, rel=0.12)


@pytest.mark.parametrize("make", [make_wide, make_wide_llama, make_wide_moe])
def test_a_plan_counts_the_operations_of_a_forward_and_a_backward_pass(make):
    model = make()
    ids, mask = rows(model.config.vocab_size, [400])
    model.config._experts_implementation = "eager"  # the counter does not know grouped products
    with FlopCounterMode(display=False) as forward:
        logprobs = sampled_logprobs(model, ids, mask)
    with FlopCounterMode(display=False) as backward:
        logprobs.sum().backward()
    # Nor does it know the kernel of attention on CPU.
    products = forward_flops(shape_of(model), 399, int(mask.sum()), length=0)
    assert forward.get_total_flops() == pytest.approx(products, rel=0.01)
    assert backward.get_total_flops() == pytest.approx(2 * products, rel=0.01)


def test_causal_attention_takes_half_the_operations_of_two_square_products():
    shape = shape_of(make_wide())
    attention = forward_flops(shape, 400, 0, 400) - forward_flops(shape, 400, 0, 0)
    queries, keys, values = (torch.zeros(1, 4, 400, 32) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        queries @ keys.mT @ values
    assert attention == counter.get_total_flops() / 2 * shape.layers


def test_a_plan_knows_what_a_token_takes_in_the_cache():
    model = make_wide().eval()
    cache = DynamicCache(config=model.config)
    model.set_attn_implementation("sdpa")
    model(torch.arange(10)[None], past_key_values=cache)
    held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    assert kv_bytes_per_token(shape_of(model), Engine(param_bytes=4)) * 10 == held
