"""A thousand trajectories with slow, failing and hanging tools: every record must be whole."""

import random
import time
from collections import Counter
from itertools import groupby

import pytest
import torch

from trace_pl.engines.vllm.engine import VLLMEngine
from trace_pl.models.loading import load_model, load_tokenizer
from trace_pl.models.logprobs import sampled_logprobs
from trace_pl.models.names import BUILT_IN_BASE, resolve_model
from trace_pl.rollout.agent import AgentLoop
from trace_pl.rollout.chat.call_formats import HermesFormat
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.rollout.trajectory import AgentLimits
from trace_pl.tasks.closed_web.task import ClosedWebTask
from trace_pl.tasks.rewards import ExactMatchReward
from trace_pl.tools.protocol import Toolbox, ToolSession
from trace_pl.training.buffer import RolloutBuffer
from trace_pl.training.row_plan import BatchPlan
from trace_pl.types import StopReason, TokenKind, ToolResult

NUM_QUESTIONS, GROUP_SIZE = 125, 8
LIMITS = AgentLimits(3, 40, 256, max_consecutive_errors=2, tool_timeout_s=0.5, tool_retries=1)


class MoodyTools(Toolbox):
    """The closed web's tools, each answering after some milliseconds, if at all."""

    def __init__(self, tools):
        self.tools = tools
        self.draws = random.Random(0)
        self.moods = Counter()

    def schemas(self):
        return self.tools.schemas()

    def session(self, question):
        return MoodySession(self, self.tools.session(question))


class MoodySession(ToolSession):
    def __init__(self, owner, session):
        self.owner = owner
        self.session = session

    def call(self, call):
        draw = self.owner.draws.random()
        mood = "down" if draw < 0.25 else "refusing" if draw < 0.33 else "fine"
        mood = "hanging" if draw > 0.997 else mood
        self.owner.moods[mood] += 1
        time.sleep(1.0 if mood == "hanging" else self.owner.draws.uniform(0.0, 0.005))
        if mood == "down":
            raise ConnectionError("service is down")
        if mood == "refusing":
            return ToolResult("Error: try another page.", error="tool")
        return self.session.call(call)


@pytest.fixture(scope="module")
def policy():
    """The built-in model, roughened so that it also writes what is no call."""
    model = load_model(BUILT_IN_BASE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.03 * torch.randn(tensor.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def run(policy):
    """Template, tools, final counts and groups of the thousand."""
    task = ClosedWebTask(hops=[3])
    tools = MoodyTools(task.toolbox())
    template = ChatTemplate(load_tokenizer(BUILT_IN_BASE), tools.schemas())
    engine = VLLMEngine(resolve_model(BUILT_IN_BASE), 512, 128, seed=0, num_threads=1)
    try:
        engine.push_weights(policy.named_parameters(), version=0)
        loop = AgentLoop(engine, template, tools, HermesFormat(), ExactMatchReward(), LIMITS)
        seen = []
        questions = task.questions("train")[:NUM_QUESTIONS]
        groups = loop.collect(questions, GROUP_SIZE, seen.append)
        assert not engine.has_unfinished()
    finally:
        engine.close()
    return template, tools, seen[-1], groups


@pytest.fixture(scope="module")
def rollouts(run):
    return [rollout for group in run[3] for rollout in group.rollouts]


def test_every_trajectory_ends_with_a_reason(run, rollouts):
    _, tools, counts, _ = run
    assert counts.total == counts.finished == NUM_QUESTIONS * GROUP_SIZE
    assert set(tools.moods) == {"fine", "refusing", "down", "hanging"}
    reasons = Counter(rollout.stop_reason for rollout in rollouts)
    assert {StopReason.ANSWERED, StopReason.MAX_TURNS, StopReason.LENGTH} <= set(reasons)
    assert StopReason.TOOL_FAILURE in reasons
    assert all(reason.counts for reason in reasons)
    # A call that failed twice in each of two attempts takes its rollout along.
    assert 0.9 * counts.total < len(rollouts) < counts.total
    errors = Counter(turn.result.error for rollout in rollouts for turn in rollout.turns)
    assert errors["parse"] > 20
    assert errors["tool"] > 20


def test_every_record_is_made_of_its_own_pieces(run, rollouts):
    template = run[0]
    header = template.generation_header
    for rollout in rollouts:
        ids = rollout.token_ids.tolist()
        expected = template.prompt_ids("", rollout.question.text)
        for turn in rollout.turns:
            expected += [*header, *ids[turn.action_start : turn.action_stop]]
            expected += [*template.observation_open, *template.observation_ids(turn.result.text)]
            expected += template.observation_close
        if len(ids) > len(expected):
            expected += header + ids[len(expected) + len(header) :]
        assert ids == expected, rollout.id
        assert len(ids) <= LIMITS.max_trajectory_tokens


def test_exactly_the_sampled_tokens_carry_log_probs_and_each_response_ends_once(run, rollouts):
    end = run[0].end_of_turn
    for rollout in rollouts:
        mask, ids = rollout.loss_mask, rollout.token_ids
        assert (rollout.logprobs[~mask] == 0.0).all()
        assert (rollout.logprobs[mask] <= 0.0).all()
        assert (rollout.logprobs[mask] < 0.0).float().mean() > 0.5 or not mask.any()
        assert (rollout.kinds[: rollout.prompt_length] == TokenKind.PROMPT).all()
        assert not (rollout.kinds[rollout.prompt_length :] == TokenKind.PROMPT).any()
        runs = [(kind, len(list(same))) for kind, same in groupby(mask.tolist())]
        lengths = [length for is_action, length in runs if is_action]
        assert len(lengths) - rollout.num_turns in (0, 1)
        assert max(lengths, default=0) <= LIMITS.max_response_tokens
        for turn in rollout.turns:
            action = slice(turn.action_start, turn.action_stop)
            assert mask[action].all()
            assert int(ids[turn.action_stop - 1]) == end
            assert not mask[turn.action_stop : turn.observation_stop].any()
        cut = rollout.stop_reason in (StopReason.LENGTH, StopReason.MAX_TOKENS)
        assert int((ids[mask] == end).sum()) >= len(lengths) - cut
        assert int((ids[mask] == end).sum()) <= len(lengths)


def test_the_samplers_log_probs_are_those_of_a_plain_forward(run, rollouts, policy):
    worst, num_tokens = 0.0, 0
    by_id = {rollout.id: rollout for rollout in rollouts}
    with torch.no_grad():
        for batch in RolloutBuffer(run[3], BatchPlan()).forward_batches():
            found = sampled_logprobs(policy, batch.token_ids_BT, batch.mask_BT)
            for row, rollout_id in zip(found, batch.rollout_ids, strict=True):
                rollout = by_id[rollout_id]
                difference = row[: len(rollout.logprobs)] - rollout.logprobs
                worst = max(worst, float(difference.abs().max()))
                num_tokens += int(rollout.loss_mask.sum())
    assert num_tokens > 20_000
    assert worst < 1e-4
