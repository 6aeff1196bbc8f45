"""Rewards beside the engine: what waits for them, and what their failures mean."""

import asyncio
import threading

import pytest
from agent_runs import ANSWER, LIMITS, make_loop, question, run
from scripted import search

from trace_pl.errors import RolloutError
from trace_pl.rollout.trajectory import AgentLimits
from trace_pl.types import Grade, StopReason

RIGHT = Grade(1.0, is_correct=True)


def limits(**settings):
    return AgentLimits(5, 200, 2000, **settings)


def test_reward_and_correctness_are_two_things():
    def paid_for_trying(question, answer, turns):
        return Grade(0.25 * len(turns), is_correct=answer == "Mira Holt")

    script = {"*": [search("a"), search("b"), "I give up."], "q1/1": [ANSWER]}
    _, groups = run(script, reward=paid_for_trying, group_size=2)
    assert [(r.reward, r.is_correct) for r in groups[0].rollouts] == [(0.5, False), (0.0, True)]


def test_a_slow_reward_stops_neither_the_engine_nor_other_rewards():
    """One is graded only when the three others have ended, after six steps of the engine."""
    release = threading.Event()

    def slow_for_one(question, answer, turns):
        if not turns:
            assert release.wait(10.0)
        return RIGHT

    steps_before = []

    def progress(counts):
        if counts.finished == 3 and not release.is_set():
            steps_before.append(engine.num_steps)
            release.set()

    script = {"*": [search("a")] * 5 + [ANSWER], "q1/0": [ANSWER]}
    engine, loop = make_loop(script, reward=slow_for_one)
    (group,) = loop.collect([question()], 4, progress)
    assert [r.num_turns for r in group.rollouts] == [0, 5, 5, 5]
    assert steps_before[0] >= 6


def test_a_reward_that_waits_for_itself_in_other_threads_is_given_them():
    """Four rollouts are graded at once, or none would be."""
    barrier = threading.Barrier(4)

    def together(question, answer, turns):
        barrier.wait(10.0)
        return RIGHT

    _, groups = run({"*": [ANSWER]}, reward=together, group_size=4)
    assert groups[0].rewards.tolist() == [1.0] * 4


def test_a_reward_that_fails_is_tried_again_and_then_its_rollout_is_left_out(caplog):
    left = {"a": 1, "b": 2}

    def flaky(question, answer, turns):
        (turn,) = turns
        if left.get(turn.call.arguments["query"], 0):
            left[turn.call.arguments["query"]] -= 1
            raise ConnectionError("judge is down")
        return RIGHT

    seen = []
    script = {f"q1/{i}": [search(query), ANSWER] for i, query in enumerate("abc")}
    _, loop = make_loop(script, reward=flaky, limits=limits(reward_retries=1))
    (group,) = loop.collect([question()], 3, seen.append)
    assert [r.index for r in group.rollouts] == [0, 2]
    assert (seen[-1].finished, seen[-1].reward_failures) == (3, 1)
    assert "reward 'flaky' for rollout q1/1: ConnectionError: judge is down" in caplog.text


def test_a_reward_that_hangs_is_left_behind(caplog):
    release = threading.Event()

    class Hanging:
        def __call__(self, question, answer, turns):
            if not turns:
                release.wait(10.0)
            return RIGHT

    script = {"*": [search("a"), ANSWER], "q1/1": [ANSWER]}
    settings = limits(reward_timeout_s=0.05, reward_retries=1)
    _, groups = run(script, reward=Hanging(), limits=settings, group_size=3)
    release.set()
    assert [r.index for r in groups[0].rollouts] == [0, 2]
    assert "reward 'Hanging' for rollout q1/1: no result within 0.05 s" in caplog.text


def test_a_phase_in_which_no_reward_works_is_an_error_in_its_own_words():
    def broken(question, answer, turns):
        return turns[0]

    with pytest.raises(
        RolloutError, match=r"all 2 failed.*'broken' for rollout q1/\d: IndexError.*reward_timeout"
    ):
        run({"*": [ANSWER]}, reward=broken, group_size=2)


def test_an_async_reward_is_awaited_and_many_at_once():
    class Judge:
        running, most = 0, 0

        async def __call__(self, question, answer, turns):
            Judge.running += 1
            Judge.most = max(Judge.most, Judge.running)
            for _ in range(500):
                if Judge.most == 3:
                    break
                await asyncio.sleep(0.01)
            Judge.running -= 1
            return Grade(0.5, is_correct=True)

    _, groups = run({"*": [ANSWER]}, reward=Judge(), group_size=3)
    assert groups[0].rewards.tolist() == [0.5] * 3
    assert Judge.most == 3


def test_an_async_reward_beyond_its_time_is_cancelled_and_its_rollout_left_out():
    cancelled = threading.Event()

    async def judge(question, answer, turns):
        if turns:
            return RIGHT
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    script = {"*": [search("a"), ANSWER], "q1/1": [ANSWER]}
    settings = limits(reward_timeout_s=0.1, reward_retries=0)
    _, groups = run(script, reward=judge, limits=settings, group_size=2)
    assert [r.index for r in groups[0].rollouts] == [0]
    assert cancelled.wait(10.0)


def test_a_rollout_beyond_its_time_is_not_waited_for_while_it_is_graded(caplog):
    release = threading.Event()

    def slow_for_one(question, answer, turns):
        if not turns:
            release.wait(10.0)
        return RIGHT

    script = {"*": [search("a"), ANSWER], "q1/1": [ANSWER]}
    _, groups = run(script, reward=slow_for_one, limits=limits(max_seconds=0.5), group_size=2)
    release.set()
    assert [r.index for r in groups[0].rollouts] == [0]
    assert "Left out: rollout q1/1 beyond 0.5 s" in caplog.text


def test_closing_the_stream_runs_no_reward_that_has_not_begun():
    release, begun = threading.Event(), []

    def slow(question, answer, turns):
        begun.append(question.id)
        release.wait(10.0)
        return RIGHT

    _, loop = make_loop({"*": [ANSWER]}, reward=slow)
    loop.num_threads = 1

    def stop(counts):
        if begun:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.collect([question("q1"), question("q2"), question("q3")], 1, stop)
    release.set()
    for thread in threading.enumerate():
        if thread.name == "trace-call":
            thread.join(10.0)
    assert len(begun) == 1


@pytest.mark.parametrize(
    ("grade", "message"),
    [
        (1.0, r"Expected a Grade from reward 'own' for rollout q1/0, got 1.0. Return .*Grade\("),
        (True, "Expected a Grade"),
        (None, "Expected a Grade"),
        (Grade(float("nan"), is_correct=True), "a finite number as reward.*rollout q1/0, got nan"),
        (Grade(float("inf"), is_correct=True), "a finite number"),
        (Grade("1", is_correct=True), "a finite number as reward.*got '1'"),
        (Grade(1.0, is_correct=1.0), "is_correct from reward 'own'.*True or False, got 1.0"),
    ],
)
def test_what_is_no_grade_ends_the_run_and_names_reward_and_rollout(grade, message):
    def own(question, answer, turns):
        return grade

    with pytest.raises(RolloutError, match=message):
        run({"*": [ANSWER]}, reward=own)


def test_a_rollout_that_does_not_count_is_not_graded():
    def down(question, call, number):
        raise ConnectionError("service is down")

    graded = []

    def counting(question, answer, turns):
        graded.append(answer)
        return RIGHT

    script = {"*": [search("a")] * 2, "q1/1": [ANSWER]}
    _, groups = run(script, tools=down, reward=counting, group_size=2)
    assert [r.stop_reason for r in groups[0].rollouts] == [StopReason.ANSWERED]
    assert graded == ["Mira Holt"]


def test_rollouts_do_not_depend_on_how_long_rewards_take():
    def uneven(question, answer, turns):
        waiting.wait(0.02 * len(turns))
        return RIGHT

    waiting = threading.Event()
    script = {f"q1/{i}": [search("a")] * i + [ANSWER] for i in range(4)}
    slow_engine, slow = run(script, reward=uneven, limits=LIMITS, group_size=4)
    engine, quick = run(script, limits=LIMITS, group_size=4)
    assert [r.token_ids.tolist() for r in slow[0].rollouts] == [
        r.token_ids.tolist() for r in quick[0].rollouts
    ]
    assert [r.stream for r in slow_engine.requests] == [r.stream for r in engine.requests]
