"""The engine says which experts read each token, and the trainer follows."""

import pytest
import torch
from builders import question
from random_models import make_qwen3_moe

from trace_pl.engines.protocol import GenerationRequest
from trace_pl.engines.transformers import HFEngine
from trace_pl.engines.vllm.engine import VLLMEngine
from trace_pl.errors import ConfigError
from trace_pl.models.experts import RouterWatch, routers
from trace_pl.models.loading import load_model
from trace_pl.models.logprobs import read_mask, sampled_logprobs
from trace_pl.rollout.record import TokenRecord
from trace_pl.types import Grade, StopReason, TokenKind

PROMPT = list(range(3, 80))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe")
    make_qwen3_moe(hidden_size=64, head_dim=32, max_position_embeddings=512).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def completions(folder):
    """Two turns of one rollout: the second prompt is the first one and its response."""
    engine = HFEngine(folder, 256, seed=3, record_experts=True)
    found, prompt = [], PROMPT
    for turn in range(2):
        engine.submit(GenerationRequest(f"turn-{turn}", prompt, 20, (96,), f"0/{turn}"))
        # Another row, longer and with fewer tokens to sample, so that both are cut.
        engine.submit(GenerationRequest("beside", [*prompt, 7, 8, 9], 5, (96,), f"1/{turn}"))
        while engine.has_unfinished():
            found += [done for done in engine.step() if done.request_id != "beside"]
        prompt = [*prompt, *found[-1].token_ids, 5, 6]
    return found


def own_choices(model, ids):
    seen = []
    hooks = [
        router.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs[2]))
        for router in routers(model)
    ]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1)


def test_every_token_that_was_read_has_its_experts(folder, completions):
    first, second = completions
    ids = [*PROMPT, *first.token_ids, 5, 6, *second.token_ids]
    assert second.experts.shape == (len(ids) - 1, 2, 2)  # nothing reads the last token
    expected = own_choices(load_model(folder), ids[:-1]).sort(dim=-1).values
    found = second.experts.long().sort(dim=-1).values
    assert float((found == expected).float().mean()) > 0.99  # ties may fall either way
    cached = len(first.experts)
    assert torch.equal(second.experts[:cached].sort(-1).values, first.experts.sort(-1).values)


def test_following_them_brings_a_perturbed_trainer_closer_to_the_engine(folder, completions):
    first = completions[0]
    ids = torch.tensor([[*PROMPT, *first.token_ids]])
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, len(PROMPT) :] = True
    sampler = torch.tensor(first.logprobs)
    model = load_model(folder)
    torch.manual_seed(1)
    for router in routers(model):
        router.weight.data += 0.1 * torch.randn_like(router.weight)
    watch = RouterWatch(model)
    with torch.no_grad():
        free = sampled_logprobs(model, ids, mask)[mask]
        watch.begin(first.experts[None][read_mask(mask)[:, :-1]])
        followed = sampled_logprobs(model, ids, mask)[mask]
    assert (followed - sampler).abs().mean() < 0.8 * (free - sampler).abs().mean()


def test_a_rollout_carries_them_for_all_tokens_but_those_after_the_last_response(completions):
    record = TokenRecord()
    record.append(PROMPT, TokenKind.PROMPT)
    first = completions[0]
    record.append(first.token_ids, TokenKind.ACTION, first.logprobs)
    record.experts = first.experts
    rollout = record.finish(question(), 0, StopReason.ANSWERED, "x", Grade(1.0, is_correct=True), 0)
    assert torch.equal(rollout.experts[:-1], first.experts)
    assert (rollout.experts[-1] == -1).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can record")
def test_vllm_on_cpu_says_that_it_can_not_record(folder):
    with pytest.raises(ConfigError, match="HFEngine"):
        VLLMEngine(folder, 256, record_experts=True)
