import threading

from agent_runs import ANSWER, LIMITS, TEMPLATE, page, question, run
from scripted import FunctionTools, ScriptedEngine, search

from trace_pl.rollout.agent import AgentLoop, ExactMatchReward
from trace_pl.search.formats import HermesFormat


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

    def progress(done, total, tokens, turns):
        finished.append((done, total))
        if done == 3:
            release.set()

    engine = ScriptedEngine(TEMPLATE, {"*": [search("a"), search("b"), search("c"), ANSWER]})
    loop = AgentLoop(
        engine, TEMPLATE, FunctionTools(slow_for_one), HermesFormat(), ExactMatchReward(), LIMITS
    )
    questions = [question("slow", "slow"), *(question(f"q{i}") for i in range(3))]
    groups = loop.collect(questions, 1, progress)
    assert (3, 4) in finished
    assert finished[-1] == (4, 4)
    assert [group.rollouts[0].num_turns for group in groups] == [3, 3, 3, 3]


def test_progress_counts_sampled_tokens_and_turns():
    seen = []
    engine = ScriptedEngine(TEMPLATE, {"*": [search("a"), ANSWER]})
    loop = AgentLoop(
        engine, TEMPLATE, FunctionTools(page), HermesFormat(), ExactMatchReward(), LIMITS
    )
    groups = loop.collect([question()], 3, lambda *numbers: seen.append(numbers))
    tokens = sum(int(rollout.loss_mask.sum()) for rollout in groups[0].rollouts)
    assert seen[-1] == (3, 3, tokens, 3)
