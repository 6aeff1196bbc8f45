"""The real engines on CPU, held to one contract; one engine of each kind serves the whole file."""

import ctypes
import os
import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scripted import SCHEMA, FunctionTools

from trace_pl.engines.auto import AutoEngine
from trace_pl.engines.protocol import GenerationRequest, stream_seed
from trace_pl.engines.server.engine import ServerEngine
from trace_pl.engines.transformers import HFEngine
from trace_pl.engines.vllm.engine import VLLMEngine
from trace_pl.errors import ConfigError, RolloutError, WeightSyncError
from trace_pl.models.loading import load_model
from trace_pl.models.logprobs import sampled_logprobs
from trace_pl.rollout.agent import AgentLoop
from trace_pl.rollout.chat.call_formats import HermesFormat
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.rollout.parity import check_parity
from trace_pl.rollout.trajectory import AgentLimits
from trace_pl.tasks.rewards import ExactMatchReward
from trace_pl.types import Question, StopReason, ToolResult

END = 2  # <|im_end|>
PROMPT = list(range(3, 303))  # longer than two blocks of the prefix cache


def make_vllm(folder):
    return VLLMEngine(folder, 512, max_num_seqs=64, kv_cache_gib=0.125, seed=3, num_threads=1)


def make_hf(folder):
    return HFEngine(folder, 512, max_num_seqs=64, seed=3)


@pytest.fixture(scope="module")
def vllm_engine(tiny_model_dir):
    """An engine of 64 sequences with the folder's own weights."""
    engine = make_vllm(str(tiny_model_dir))
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=["vllm", "transformers", "server"])
def engine(request, tiny_model_dir):
    """Each engine."""
    if request.param == "transformers":
        return make_hf(str(tiny_model_dir))
    return request.getfixturevalue(f"{request.param}_engine")


@pytest.fixture
def policy(tiny_model_dir, engine):
    """A trainer's copy of the weights; afterwards the engine gets the original ones back."""
    model = load_model(str(tiny_model_dir))
    original = {name: tensor.clone() for name, tensor in model.named_parameters()}
    yield model
    engine.push_weights(original.items(), version=0)


def generate(engine, streams, max_tokens=20, prompt=PROMPT, stops=(END,)):
    """Sample one completion per stream, together."""
    for stream in streams:
        engine.submit(GenerationRequest(f"id-{stream}", prompt, max_tokens, stops, stream))
    found = {}
    while engine.has_unfinished():
        for completion in engine.step():
            found[completion.request_id.removeprefix("id-")] = completion
    return found


def trainer_logprobs(policy, completion, prompt=PROMPT):
    """The trainer's log-probs of a completion."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, len(prompt) :] = True
    with torch.no_grad():
        return sampled_logprobs(policy, ids, mask)[0, len(prompt) :]


def perturb(policy, names=("",)):
    """Change every parameter whose name holds one of ``names``."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in policy.named_parameters():
            if any(part in name for part in names):
                tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))


# --- sampling --------------------------------------------------------------------------------


def test_sampling_log_probs_are_those_of_the_trainer(engine, policy):
    for completion in generate(engine, ["a", "b", "c"]).values():
        torch.testing.assert_close(
            torch.tensor(completion.logprobs),
            trainer_logprobs(policy, completion),
            rtol=0,
            atol=1e-4,
        )


def test_a_response_ends_with_the_sampled_end_token_or_at_its_limit(engine):
    found = generate(engine, [f"s{i}" for i in range(64)], max_tokens=50).values()
    stopped = [c for c in found if c.finish_reason == "stop"]
    cut = [c for c in found if c.finish_reason == "length"]
    assert stopped
    assert cut
    assert all(c.token_ids[-1] == END and END not in c.token_ids[:-1] for c in stopped)
    assert all(len(c.token_ids) == 50 and END not in c.token_ids for c in cut)
    assert all(len(c.logprobs) == len(c.token_ids) for c in found)


def test_any_of_several_stop_tokens_ends_a_response_and_is_kept_with_its_log_prob(engine, policy):
    streams = [f"s{i}" for i in range(64)]
    longer = generate(engine, streams, max_tokens=50)
    often = Counter(t for c in longer.values() for t in set(c.token_ids[1:-1]))
    other = often.most_common(1)[0][0]
    found = generate(engine, streams, max_tokens=50, stops=(END, other))
    assert sum(c.token_ids[-1] == other for c in found.values()) >= often[other]
    for stream, completion in found.items():
        whole = longer[stream].token_ids
        ends = [at for at, token in enumerate(whole, start=1) if token in (END, other)]
        assert completion.token_ids == whole[: min(ends, default=50)]
        assert completion.finish_reason == ("stop" if ends else "length")
    stopped = next(c for c in found.values() if c.token_ids[-1] == other)
    torch.testing.assert_close(
        torch.tensor(stopped.logprobs), trainer_logprobs(policy, stopped), rtol=0, atol=1e-4
    )


def test_a_stream_gives_the_same_tokens_whatever_runs_beside_it(engine):
    alone = generate(engine, ["a"])["a"]
    crowd = generate(engine, [f"s{i}" for i in range(30)] + ["a"])
    assert crowd["a"].token_ids == alone.token_ids
    assert len({c.token_ids for c in crowd.values()}) == 31


def test_streams_of_another_seed_differ():
    assert stream_seed(0, "7/q1/0/0/1") == 8592923763827466225
    assert stream_seed(1, "7/q1/0/0/1") != stream_seed(0, "7/q1/0/0/1")


def test_vllm_compiles_nothing(vllm_engine):
    torch._dynamo.utils.counters.clear()
    generate(vllm_engine, ["a", "b"])
    assert not torch._dynamo.utils.counters["frames"]


def test_vllm_does_not_keep_memory_for_every_length_it_has_seen(vllm_engine):
    def resident_mib():
        ctypes.CDLL(None).malloc_trim(0)  # what is free already does not count
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    generate(vllm_engine, ["a"], max_tokens=1, prompt=[5] * 500)
    before = resident_mib()
    for length in range(200, 440):
        prompt = [3 + (length * i) % 500 for i in range(length)]  # shares no prefix
        generate(vllm_engine, ["a"], max_tokens=1, prompt=prompt)
    assert resident_mib() - before < 60.0


def test_the_trainers_random_states_and_threads_are_left_alone(engine):
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    expected = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    generate(engine, ["a", "b"])
    engine.prompt_logprobs(PROMPT)
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        generate(engine, ["a"])
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def finish(engine):
    """Step until the engine is idle and return what came back, by request."""
    found = {}
    while engine.has_unfinished():
        found.update((completion.request_id, completion) for completion in engine.step())
    return found


def test_a_cancelled_request_never_comes_back_and_the_others_tokens_stay_the_same(engine):
    streams = ["a", "b", "c", "d"]
    expected = generate(engine, streams)
    for stream in streams:
        engine.submit(GenerationRequest(stream, PROMPT, 20, (END,), stream))
    found = {}
    if isinstance(engine, VLLMEngine):  # the other one samples whole responses
        for _ in range(3):
            found.update((c.request_id, c) for c in engine.step())
    assert not found
    engine.cancel(["b", "d", "never submitted"])
    found = finish(engine)
    assert set(found) == {"a", "c"}
    for stream, completion in found.items():
        assert completion.token_ids == expected[stream].token_ids


def test_an_engine_is_idle_after_everything_is_cancelled(engine, policy):
    for stream in ("a", "b"):
        engine.submit(GenerationRequest(stream, PROMPT, 20, (END,), stream))
    if isinstance(engine, VLLMEngine):
        engine.step()
    engine.cancel([])
    assert engine.has_unfinished()
    engine.cancel(["a", "b"])
    assert not engine.has_unfinished()
    assert engine.step() == []
    perturb(policy)
    engine.push_weights(policy.named_parameters(), version=1)  # asks for an empty cache
    assert check_parity(engine, policy, PROMPT, tolerance=1e-4).max_abs_diff < 1e-4
    # A name can be used again, whatever became of it before.
    engine.submit(GenerationRequest("a", PROMPT, 20, (END,), "c"))
    assert set(finish(engine)) == {"a"}


# --- weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["embed_tokens", "self_attn", "mlp", "norm", ""])
def test_a_push_reaches_every_kind_of_parameter(engine, policy, part):
    perturb(policy, [part])
    with pytest.raises(WeightSyncError, match=r"policy version -?\d, got a difference"):
        check_parity(engine, policy, PROMPT, tolerance=1e-4)
    engine.push_weights(policy.named_parameters(), version=4)
    assert check_parity(engine, policy, PROMPT, tolerance=1e-4).max_abs_diff < 1e-4
    assert engine.version == 4


def test_prefixes_cached_before_a_push_are_not_used_after_it(engine, policy):
    generate(engine, ["a"])
    perturb(policy)
    engine.push_weights(policy.named_parameters(), version=1)
    completion = generate(engine, ["a"])["a"]
    torch.testing.assert_close(
        torch.tensor(completion.logprobs), trainer_logprobs(policy, completion), rtol=0, atol=1e-4
    )


def test_pushed_weights_are_a_copy(engine, policy):
    engine.push_weights(policy.named_parameters(), version=1)
    before = engine.prompt_logprobs(PROMPT)
    perturb(policy)
    assert torch.equal(engine.prompt_logprobs(PROMPT), before)


def test_a_push_while_requests_are_unfinished_is_refused(engine, policy):
    engine.submit(GenerationRequest("id", PROMPT, 5, (END,), "a"))
    engine.submit(GenerationRequest("id-2", PROMPT, 5, (END,), "b"))
    if isinstance(engine, VLLMEngine):  # the other one samples whole responses
        engine.step()
    with pytest.raises(RolloutError, match="unfinished requests"):
        engine.push_weights(policy.named_parameters(), version=1)
    while engine.has_unfinished():
        engine.step()


def test_weights_that_are_not_numbers_fail_the_parity_check(engine, policy):
    with torch.no_grad():
        policy.model.norm.weight.fill_(float("nan"))
    with pytest.raises(WeightSyncError, match="difference of nan"):
        check_parity(engine, policy, PROMPT, tolerance=1e9)


def test_weights_of_another_model_are_refused(tiny_model_dir, policy):
    engine = make_hf(str(tiny_model_dir))
    named = dict(policy.named_parameters())
    norm = named.pop("model.norm.weight")
    with pytest.raises(RolloutError, match=r"got none for \['model\.norm\.weight'\]"):
        engine.push_weights(named.items(), version=1)
    with pytest.raises(RolloutError, match=r"got 'model\.norm\.weight' of shape \[32\]"):
        engine.push_weights([("model.norm.weight", norm[:32])], version=1)
    assert engine.version == -1


def test_transformers_samples_the_models_own_distribution(tiny_model_dir, policy):
    """Frequencies of the first token against its probabilities, at other settings than 1."""
    engine = HFEngine(str(tiny_model_dir), max_num_seqs=5000, temperature=0.5, top_p=0.6, seed=1)
    found = generate(engine, [str(i) for i in range(5000)], max_tokens=1, prompt=PROMPT[:4])
    tokens = torch.tensor([c.token_ids[0] for c in found.values()])
    with torch.no_grad():
        probabilities = (policy(torch.tensor([PROMPT[:4]])).logits[0, -1] / 0.5).softmax(0)
    ordered, order = probabilities.sort(descending=True)
    kept = order[ordered.cumsum(0) - ordered < 0.6]
    expected = torch.zeros_like(probabilities)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    frequencies = torch.bincount(tokens, minlength=len(expected)) / len(tokens)
    assert set(tokens.tolist()) <= set(kept.tolist())
    # Five standard deviations of a frequency from 5,000 draws.
    bound = 5 * (expected * (1 - expected) / len(tokens)).sqrt() + 1e-3
    assert bool(((frequencies - expected).abs() <= bound).all())
    for completion in list(found.values())[:50]:
        assert completion.logprobs[0] == pytest.approx(
            float(expected[completion.token_ids[0]].log()), abs=1e-4
        )


# --- the agent loop on top -------------------------------------------------------------------


def test_the_agent_loop_gives_the_same_rollouts_again(engine, policy, tokenizer):
    template = ChatTemplate(tokenizer, [SCHEMA])
    tools = FunctionTools(lambda *_: ToolResult("a page"))
    limits = AgentLimits(4, 40, 512)
    loop = AgentLoop(engine, template, tools, HermesFormat(), ExactMatchReward(), limits)
    questions = [Question(f"q{i}", "Who built the tower?", ("Mira Holt",)) for i in range(3)]
    first = [r for group in loop.collect(questions, 8) for r in group.rollouts]
    second = [r for group in loop.collect(questions, 8) for r in group.rollouts]
    assert len(first) == 24
    for a, b in zip(first, second, strict=True):
        assert a.id == b.id
        assert torch.equal(a.token_ids, b.token_ids)
    assert len({tuple(r.token_ids.tolist()) for r in first}) == 24
    assert {r.stop_reason for r in first} <= {StopReason.LENGTH, StopReason.ANSWERED}
    for rollout in first:
        mask = rollout.loss_mask[None]
        with torch.no_grad():
            expected = sampled_logprobs(policy, rollout.token_ids[None], mask)[0]
        torch.testing.assert_close(rollout.logprobs, expected, rtol=0, atol=1e-4)


# --- refused at the start --------------------------------------------------------------------


@pytest.mark.parametrize("make_engine", [VLLMEngine, ServerEngine])
def test_a_path_that_does_not_exist_is_refused_at_once(tmp_path, make_engine):
    with pytest.raises(ConfigError, match="does not exist"):
        make_engine(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("make_engine", [VLLMEngine, ServerEngine])
def test_a_cache_larger_than_memory_is_refused(tiny_model_dir, make_engine):
    with pytest.raises(ConfigError, match=r"kv_cache_gib` within .* got 1e.06"):
        make_engine(str(tiny_model_dir), kv_cache_gib=1e6)


@pytest.mark.parametrize("make_engine", [VLLMEngine, HFEngine, ServerEngine])
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_sampling_settings_without_a_distribution_are_refused(
    tiny_model_dir, settings, make_engine
):
    with pytest.raises(ConfigError, match=f"Expected .*{next(iter(settings))}"):
        make_engine(str(tiny_model_dir), **settings)


def test_an_engine_that_would_serve_no_request_is_refused(tiny_model_dir):
    with pytest.raises(ConfigError, match="max_num_seqs of at least 1, got 0"):
        HFEngine(str(tiny_model_dir), max_num_seqs=0)


def test_a_missing_vllm_says_how_to_install_it(tiny_model_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"pip install 'trace-pl\[vllm"):
        VLLMEngine(str(tiny_model_dir))


@pytest.mark.parametrize(("installed", "kind"), [(True, VLLMEngine), (False, HFEngine)])
def test_auto_takes_vllm_if_it_is_installed(tiny_model_dir, monkeypatch, caplog, installed, kind):
    if not installed:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    engine = AutoEngine(str(tiny_model_dir), 512, seed=3)
    try:
        assert type(engine.engine) is kind
        assert ("pip install 'trace-pl[vllm]'" in caplog.text) is not installed
        found = generate(engine, ["a", "b"])
        assert {len(c.token_ids) for c in found.values()} <= set(range(1, 21))
        engine.submit(GenerationRequest("a", PROMPT, 20, (END,), "a"))
        engine.cancel(["a"])
        assert not engine.has_unfinished()
        assert engine.version == -1
    finally:
        engine.close()
