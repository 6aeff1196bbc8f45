import logging
import threading
import time

import pytest
from agent_runs import ANSWER, LIMITS, TEMPLATE, make_loop, page, prompt_length, question, run
from scripted import FunctionTools, ScriptedEngine, rollout_name, search

from trace_pl.engines.protocol import Completion
from trace_pl.errors import ConfigError, DataError, RolloutError
from trace_pl.rollout.agent import AgentLoop
from trace_pl.rollout.chat.call_formats import HermesFormat
from trace_pl.rollout.trajectory import AgentLimits
from trace_pl.tasks.rewards import ExactMatchReward
from trace_pl.types import StopReason


def test_a_rollout_whose_tool_fails_is_tried_once_more_from_the_start(caplog):
    broken = {"left": 4}  # two attempts of the call in each of two rollouts

    def flaky(question, call, number):
        if call.arguments["query"] == "b" and broken["left"]:
            broken["left"] -= 1
            raise ConnectionError("service is down")
        return page(question, call, number)

    script = {"*": [search("a"), search("b"), search("a"), search("b"), ANSWER]}
    with caplog.at_level(logging.WARNING):
        _, groups = run(script, tools=flaky, group_size=2)
    assert [r.num_turns for r in groups[0].rollouts] == [2, 2]
    assert [r.stop_reason for r in groups[0].rollouts] == [StopReason.ANSWERED] * 2
    assert "tool 'b'" not in caplog.text
    assert "ConnectionError: service is down" in caplog.text


def test_a_rollout_whose_tool_fails_twice_leaves_its_group():
    def broken_for_two(question, call, number):
        if call.arguments["query"] == "bad":
            raise ConnectionError("service is down")
        return page(question, call, number)

    script = {"*": [search("a"), ANSWER], "q1/1": [search("bad")] * 2}
    _, groups = run(script, tools=broken_for_two, group_size=3)
    assert [r.index for r in groups[0].rollouts] == [0, 2]


def test_a_tool_that_hangs_does_not_hang_the_phase():
    release = threading.Event()

    def hang(question, call, number):
        if call.arguments["query"] == "bad":
            release.wait(10.0)
        return page(question, call, number)

    limits = AgentLimits(5, 200, 2000, tool_timeout_s=0.05, tool_retries=1)
    script = {"*": [search("a"), ANSWER], "q1/1": [search("bad")] * 2}
    _, groups = run(script, tools=hang, limits=limits, group_size=2)
    release.set()
    assert [r.index for r in groups[0].rollouts] == [0]


def test_a_phase_without_any_rollout_is_an_error_with_the_tools_own_words():
    def down(question, call, number):
        raise ConnectionError("service is down")

    with pytest.raises(RolloutError, match=r"all 2 failed.*ConnectionError: service is down"):
        run({"*": [search("a")] * 2}, tools=down, group_size=2)


def test_requests_lost_by_the_engine_are_an_error():
    class Forgetful(ScriptedEngine):
        def submit(self, request):
            pass

    engine = Forgetful(TEMPLATE, {})
    loop = AgentLoop(
        engine, TEMPLATE, FunctionTools(page), HermesFormat(), ExactMatchReward(), LIMITS
    )
    with pytest.raises(RolloutError, match="work on 1 requests, got an idle engine"):
        loop.collect([question()], 1)


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_phase_that_ends_by_an_exception_leaves_nothing_in_the_engine():
    engine, loop = make_loop({"*": [ANSWER]})
    engine.is_held = lambda rollout, step: rollout == "q1/1" and step == 1
    with pytest.raises(KeyboardInterrupt):
        loop.collect([question()], 2, interrupt)
    assert [rollout_name(request) for request in engine.requests] == ["q1/0", "q1/1"]
    assert not engine.has_unfinished()


def test_a_completion_that_comes_in_spite_of_cancelling_is_dropped_by_id():
    class Stubborn(ScriptedEngine):
        def cancel(self, request_ids):
            pass

    engine = Stubborn(TEMPLATE, {"*": [ANSWER]})
    tools = FunctionTools(page)
    loop = AgentLoop(engine, TEMPLATE, tools, HermesFormat(), ExactMatchReward(), LIMITS)
    engine.is_held = lambda rollout, step: rollout == "q1/1" and step == 1
    with pytest.raises(KeyboardInterrupt):
        loop.collect([question()], 2, interrupt)
    assert engine.has_unfinished()
    groups = loop.collect([question()], 2)
    assert [r.id for r in groups[0].rollouts] == ["q1/0", "q1/1"]


# --- the clock -------------------------------------------------------------------------------


def test_a_rollout_beyond_its_time_is_left_out_and_cancelled(caplog):
    """One waits for the engine, one for a tool; the third is quick."""
    release = threading.Event()

    def hang(question, call, number):
        if call.arguments["query"] == "slow":
            release.wait(10.0)
        return page(question, call, number)

    engine, loop = make_loop(
        {"*": [ANSWER], "q1/1": [search("slow")]},
        hang,
        AgentLimits(5, 200, 2000, max_seconds=0.2),
        is_held=lambda rollout, step: rollout == "q1/0",
    )
    start = time.monotonic()
    groups = loop.collect([question()], 3)
    release.set()
    assert 0.2 <= time.monotonic() - start < 5.0
    assert [r.index for r in groups[0].rollouts] == [2]
    assert not engine.has_unfinished()
    assert "Left out: rollout q1/0 beyond 0.2 s" in caplog.text
    assert "Left out: rollout q1/1 beyond 0.2 s" in caplog.text


def test_the_clock_does_not_judge_the_policy():
    assert not StopReason.DEADLINE.counts
    assert not StopReason.INFRASTRUCTURE.counts
    assert not StopReason.REWARD_FAILURE.counts
    assert StopReason.MAX_TOKENS.counts


def test_a_phase_in_which_everything_takes_too_long_names_the_limit():
    with pytest.raises(RolloutError, match=r"all 2 failed.*beyond 0.05 s.*limits.max_seconds"):
        run(
            {"*": [ANSWER]},
            group_size=2,
            limits=AgentLimits(5, 200, 2000, max_seconds=0.05),
            is_held=lambda rollout, step: True,
        )


# --- responses without content ---------------------------------------------------------------


def test_an_empty_response_ends_the_rollout_without_an_answer():
    _, groups = run({"*": [""]}, group_size=2)
    for rollout in groups[0].rollouts:
        assert (rollout.stop_reason, rollout.answer, rollout.reward) == (
            StopReason.ANSWERED,
            None,
            0.0,
        )
        assert rollout.token_ids[rollout.loss_mask].tolist() == [TEMPLATE.end_of_turn]


def test_a_response_without_a_single_token_is_kept_and_carries_no_loss():
    class Silent(ScriptedEngine):
        def _complete(self, request):
            return Completion(request.request_id, (), (), "length")

    engine = Silent(TEMPLATE, {})
    tools = FunctionTools(page)
    loop = AgentLoop(engine, TEMPLATE, tools, HermesFormat(), ExactMatchReward(), LIMITS)
    (rollout,) = loop.collect([question()], 1)[0].rollouts
    assert rollout.stop_reason is StopReason.MAX_TOKENS
    assert not rollout.loss_mask.any()


def test_a_prompt_without_room_to_respond_is_refused_by_question():
    limit = prompt_length() + len(TEMPLATE.generation_header) + 1
    long = question("q9", "Who built the very old tower in the town?")
    engine = ScriptedEngine(TEMPLATE, {"*": [ANSWER]})
    loop = AgentLoop(
        engine,
        TEMPLATE,
        FunctionTools(page),
        HermesFormat(),
        ExactMatchReward(),
        AgentLimits(5, 200, limit),
    )
    with pytest.raises(DataError, match=rf"\({limit}\) for question 'q9'"):
        loop.collect([question(), long], 1)
    assert engine.requests == []


def test_a_trajectory_longer_than_the_engine_reads_is_refused():
    with pytest.raises(ConfigError, match=r"max_model_len \(100\), got 2000"):
        run({}, max_model_len=100)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_turns": 0},
        {"max_response_tokens": 0},
        {"max_trajectory_tokens": 1},
        {"max_consecutive_errors": 0},
        {"tool_timeout_s": 0.0},
        {"tool_retries": -1},
        {"reward_timeout_s": 0.0},
        {"reward_retries": -1},
        {"max_seconds": 0.0},
    ],
)
def test_limits_that_allow_nothing_are_refused(settings):
    with pytest.raises(ConfigError, match=f"limits.{next(iter(settings))}"):
        AgentLimits(**settings)
