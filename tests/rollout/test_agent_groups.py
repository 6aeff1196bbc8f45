import threading
from itertools import pairwise

from agent_runs import ANSWER, make_loop, page, question, run
from scripted import search
from tqdm import tqdm

from trace_pl.rollout.progress import RolloutBar, RolloutCounts, describe
from trace_pl.types import ToolResult


def test_groups_come_in_question_order_and_rollouts_by_index():
    script = {
        "q1/0": [search("a"), search("b"), ANSWER],
        "q1/1": [ANSWER],
        "q2/0": ["<answer>Someone else</answer>"],
        "q2/1": [search("a"), ANSWER],
    }
    _, groups = run(script, questions=[question("q1"), question("q2")], group_size=2)
    assert [[r.id for r in group.rollouts] for group in groups] == [
        ["q1/0", "q1/1"],
        ["q2/0", "q2/1"],
    ]
    assert [group.rewards.tolist() for group in groups] == [[1.0, 1.0], [0.0, 1.0]]
    assert [[r.num_turns for r in group.rollouts] for group in groups] == [[2, 0], [0, 1]]


def test_a_question_asked_twice_gets_two_groups_with_their_own_random_numbers():
    engine, groups = run({"*": [ANSWER]}, questions=[question(), question()], group_size=2)
    assert [len(group.rollouts) for group in groups] == [2, 2]
    assert len({request.stream for request in engine.requests}) == 4


def test_streams_do_not_depend_on_the_order_of_events():
    script = {"*": [search("a"), search("b"), ANSWER]}
    first, _ = run(script, group_size=4)
    second, _ = run(
        script, group_size=4, is_held=lambda rollout, step: (int(rollout[-1]) + step) % 3 > 0
    )
    assert [r.stream for r in first.requests] != [r.stream for r in second.requests]
    assert {(r.stream, r.prompt_ids) for r in first.requests} == {
        (r.stream, r.prompt_ids) for r in second.requests
    }


def test_a_slow_tool_holds_up_nobody_else():
    release = threading.Event()
    finished = []

    def slow_for_one(question, call, number):
        if question == "slow":
            assert release.wait(10.0)
        return page(question, call, number)

    def progress(counts):
        finished.append((counts.finished, counts.total))
        if counts.finished == 3:
            release.set()

    _, loop = make_loop({"*": [search("a"), search("b"), search("c"), ANSWER]}, slow_for_one)
    questions = [question("slow", "slow"), *(question(f"q{i}") for i in range(3))]
    groups = loop.collect(questions, 1, progress)
    assert (3, 4) in finished
    assert finished[-1] == (4, 4)
    assert [group.rollouts[0].num_turns for group in groups] == [3, 3, 3, 3]


def test_progress_counts_tokens_turns_and_tool_errors():
    def fail_once(question, call, number):
        if call.arguments["query"] == "b" and not failed:
            failed.append(1)
            return ToolResult("no such page", error="tool")
        return page(question, call, number)

    seen, failed = [], []
    script = {"*": [search("a"), search("b"), ANSWER], "q1/0": ["<tool_call>{</tool_call>", ANSWER]}
    _, loop = make_loop(script, fail_once)
    groups = loop.collect([question()], 3, seen.append)
    tokens = sum(int(rollout.loss_mask.sum()) for rollout in groups[0].rollouts)
    assert seen[-1] == RolloutCounts(total=3, finished=3, tokens=tokens, turns=5, tool_errors=2)
    assert all(a.tokens <= b.tokens for a, b in pairwise(seen))


def test_the_bar_shows_trajectories_speed_turns_and_errors(tmp_path):
    counts = RolloutCounts(total=8, finished=4, tokens=12_000, turns=10, tool_errors=3)
    assert describe(counts, 2.0) == "6,000 tok/s, 2.5 turns, 3 tool errors"
    assert describe(RolloutCounts(), 0.0) == "0 tok/s, 0.0 turns, 0 tool errors"
    with (tmp_path / "bar").open("w+") as file:
        with RolloutBar("rollouts", file) as bar:
            bar.show(counts)
            assert bar._bar.n == 4
            bar._bar.refresh()
        file.seek(0)
        text = file.read()
    assert "rollouts:  50%" in text
    assert "4/8" in text
    assert "2.5 turns, 3 tool errors" in text
    assert not tqdm._instances


# --- groups as they finish -------------------------------------------------------------------


def test_groups_are_handed_on_in_the_order_of_finishing_while_others_run():
    engine, loop = make_loop(
        {"*": [search("a"), ANSWER], "q0/1": [search("a"), search("b"), search("c"), ANSWER]}
    )
    stream = loop.stream([question(f"q{i}") for i in range(3)], 2)
    order = [next(stream), next(stream)]
    assert {position for position, _ in order} == {1, 2}
    assert [[r.index for r in group.rollouts] for _, group in order] == [[0, 1]] * 2
    assert engine.has_unfinished()
    (last,) = stream
    assert (last[0], [r.num_turns for r in last[1].rollouts]) == (0, [1, 3])


def test_closing_the_stream_cancels_what_runs():
    release = threading.Event()
    calls = []

    def hang(question, call, number):
        calls.append(question)
        if question == "slow":
            release.wait(10.0)
        return page(question, call, number)

    engine, loop = make_loop(
        {"*": [ANSWER], "q2/0": [search("a")] * 5, "q3/0": [ANSWER]},
        hang,
        is_held=lambda rollout, step: rollout == "q3/0",
    )
    questions = [question("q1"), question("q2", "slow"), question("q3")]
    stream = loop.stream(questions, 1)
    assert next(stream)[0] == 0
    while not calls:  # q2 waits for its tool, q3 for the engine
        assert engine.has_unfinished()
    stream.close()
    assert not engine.has_unfinished()
    release.set()
    engine.is_held = lambda rollout, step: False
    engine.script = {"*": [ANSWER]}
    assert [len(group.rollouts) for group in loop.collect(questions, 1)] == [1, 1, 1]
