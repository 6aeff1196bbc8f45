import math

import pytest
import torch
from random_models import VOCAB, make_llama, make_qwen3, make_qwen3_moe

from trace_pl.errors import ConfigError, CreditError
from trace_pl.probes import Branch, ProbeRequest
from trace_pl.scoring import BranchedScorer, PrefixScorer


@pytest.fixture(autouse=True)
def _one_thread():
    """Forwards this small lose most of their time when two threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw_ids(count, generator):
    return tuple(torch.randint(0, VOCAB, (count,), generator=generator).tolist())


def ragged_requests(seed, count=9):
    """Rollouts of 0 to 8 turns, 1 to 3 answers of 1 to 5 tokens, openings of 0 to 4 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    requests = []
    for index in range(count):
        steps = torch.randint(1, 12, (index % 9 + 1,), generator=generator)
        ends = tuple(steps.cumsum(0).tolist())
        branches = tuple(
            Branch(draw_ids(draw(0, 5), generator), draw_ids(draw(1, 6), generator))
            for _ in range(draw(1, 4))
        )
        length = ends[-1] + draw(0, 9)
        ids = torch.randint(0, VOCAB, (length,), generator=generator)
        requests.append(ProbeRequest(f"q/{index}", ids, ends, branches))
    return requests


def score_by_hand(model, request):
    """One unbatched, unpadded forward for each answer token."""
    scores = torch.empty(len(request.prefix_ends), len(request.branches))
    for boundary, end in enumerate(request.prefix_ends):
        for number, branch in enumerate(request.branches):
            read = [*request.token_ids[:end].tolist(), *branch.opening_ids]
            total = 0.0
            for token in branch.answer_ids:
                with torch.no_grad():
                    logits = model(torch.tensor([read])).logits[0, -1]
                total += logits.double().log_softmax(0)[token].item()
                read.append(token)
            scores[boundary, number] = total / len(branch.answer_ids)
    return scores


def assert_same_scores(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make_scorer", [PrefixScorer, BranchedScorer])
def test_scorer_equals_one_forward_per_answer_token(make_scorer):
    model, requests = make_qwen3(), ragged_requests(seed=1, count=5)
    expected = [score_by_hand(model, request) for request in requests]
    assert_same_scores(make_scorer(model).score(requests), expected)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make_model", [make_qwen3, make_llama, make_qwen3_moe])
def test_branched_scorer_equals_prefix_scorer_on_ragged_input(make_model, seed):
    model, requests = make_model(), ragged_requests(seed)
    branched = BranchedScorer(model, token_budget=400).score(requests)
    assert_same_scores(branched, PrefixScorer(model, max_tokens_per_batch=300).score(requests))


@pytest.mark.parametrize("make_scorer", [PrefixScorer, BranchedScorer])
@pytest.mark.parametrize("budget", [1, 150, 100_000])
def test_budget_changes_nothing_but_the_batches(make_scorer, budget):
    model, requests = make_qwen3(), ragged_requests(seed=4)
    assert_same_scores(
        make_scorer(model, budget).score(requests), make_scorer(model).score(requests)
    )


def test_a_branch_sees_nothing_of_later_turns_or_other_branches():
    """Scores at a boundary stay put when all tokens after it and all other answers change."""
    model = make_qwen3()
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (30,), generator=generator)
    changed = torch.cat([ids[:12], (ids[12:] + 1) % VOCAB])
    probed = Branch((1, 2), (3, 4))
    first, second = BranchedScorer(model).score(
        [
            ProbeRequest("q/0", ids, (5, 12, 30), (probed, Branch((7,), (8, 9)))),
            ProbeRequest("q/1", changed, (5, 12, 30), (probed, Branch((11,), (10,)))),
        ]
    )
    torch.testing.assert_close(first[:2, 0], second[:2, 0], atol=1e-5, rtol=0.0)
    assert not torch.isclose(first[2, 0], second[2, 0], atol=1e-3)


def test_a_model_that_knows_nothing_gives_the_uniform_logprob():
    model = make_qwen3()
    torch.nn.init.zeros_(model.lm_head.weight)
    for scores in BranchedScorer(model).score(ragged_requests(seed=5)):
        torch.testing.assert_close(
            scores, torch.full_like(scores, -math.log(VOCAB)), atol=1e-5, rtol=0.0
        )


def test_scores_of_a_bfloat16_model_are_float32_and_close():
    requests = ragged_requests(seed=6)
    precise = BranchedScorer(make_qwen3(initializer_range=0.05)).score(requests)
    rough = BranchedScorer(make_qwen3(initializer_range=0.05).bfloat16()).score(requests)
    for one, other in zip(rough, precise, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.0)


@pytest.mark.parametrize("make_scorer", [PrefixScorer, BranchedScorer])
def test_scores_leave_no_gradient_and_may_enter_a_loss(make_scorer):
    weight = torch.ones((), requires_grad=True)
    (scores,) = make_scorer(make_qwen3()).score(ragged_requests(seed=0, count=1))
    assert not scores.requires_grad
    (weight * scores).sum().backward()
    torch.testing.assert_close(weight.grad, scores.sum(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("make_scorer", [PrefixScorer, BranchedScorer])
def test_no_requests_give_no_scores(make_scorer):
    assert make_scorer(make_qwen3()).score([]) == []


@pytest.mark.parametrize("make_scorer", [PrefixScorer, BranchedScorer])
def test_a_broken_model_is_refused_with_rollout_boundary_and_answer(make_scorer):
    model = make_qwen3()
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(CreditError, match="rollout q/0 at boundary 0 for answer 0, got nan"):
        make_scorer(model).score(ragged_requests(seed=0, count=1))


def test_an_attention_that_ignores_masks_is_refused():
    with pytest.raises(ConfigError, match="attention 'trace_packed', got 'eager'"):
        BranchedScorer(make_qwen3(attn_implementation="eager"))


def test_sliding_attention_is_refused():
    model = make_qwen3(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    with pytest.raises(ConfigError, match="full attention in every layer"):
        BranchedScorer(model)


@pytest.mark.parametrize("make_scorer", [PrefixScorer, BranchedScorer])
def test_a_budget_below_one_token_is_refused(make_scorer):
    with pytest.raises(ConfigError, match="at least 1"):
        make_scorer(make_qwen3(), 0)


def test_branched_scorer_reads_each_trajectory_once():
    """Tokens through the model: the trajectory up to its last boundary, and its branches."""
    model = make_qwen3()
    read = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    ids = torch.arange(40) % VOCAB
    branch = Branch((1, 2, 3), (4, 5))
    BranchedScorer(model).score([ProbeRequest("q/0", ids, (10, 20, 30), (branch,))])
    assert read == [30 + 3 * 4]
