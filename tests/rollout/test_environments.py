"""Rollouts in environments with state: opened, paid, ended and closed as they should be."""

import threading
import time
from typing import ClassVar

import pytest
from agent_runs import LIMITS, TEMPLATE, make_loop, question
from scripted import search

from callbacks.rollout_writer import rollout_record
from trace_pl.errors import RolloutError
from trace_pl.rollout.trajectory import AgentLimits
from trace_pl.tasks import EnvironmentReward
from trace_pl.tools import EnvironmentTools
from trace_pl.types import Question, StopReason, ToolCall


class Counter:
    """An environment as TRL's users write them: the third search wins."""

    made: ClassVar[list["Counter"]] = []

    def __init__(self):
        self.num_searches = 0
        self.num_closed = 0
        self.done = False
        self.asked = {}
        Counter.made.append(self)

    def reset(self, **fields):
        self.asked = fields
        return f"Level {fields.get('level', 1)}."

    def search(self, query: str) -> str:
        """Search.

        Args:
            query: what for.
        """
        if query == "down":
            raise ConnectionError("gone")
        if query == "hang":
            time.sleep(0.5)
        self.num_searches += 1
        self.done = self.num_searches == 3
        return f"search {self.num_searches}"

    def get_reward(self):
        return self.num_searches / 3

    def close(self):
        self.num_closed += 1


@pytest.fixture(autouse=True)
def made():
    Counter.made.clear()
    tools = EnvironmentTools(Counter)
    (sample,) = Counter.made
    assert sample.num_closed == 1
    Counter.made.clear()
    return tools


def play(tools, script, limits=LIMITS, group_size=1, **settings):
    _, loop = make_loop(script, tools, limits, EnvironmentReward(), **settings)
    asked = Question("q1", "Win.", ("won",), {"level": 4})
    (group,) = loop.collect([asked], group_size)
    return group.rollouts


def test_an_environment_is_reset_with_the_row_and_speaks_at_the_end_of_the_prompt(made):
    (rollout,) = play(made, {"*": [search("a"), "I stop."]})
    (environment,) = Counter.made
    assert environment.asked == {"level": 4, "id": "q1", "question": "Win."}
    prompt = TEMPLATE.decode(rollout.token_ids[: rollout.prompt_length].tolist())
    assert "Win.\n\nLevel 4.<|im_end|>" in prompt
    assert rollout_record(rollout, TEMPLATE)["messages"][-4]["content"] == "Win.\n\nLevel 4."
    assert environment.num_closed == 1


def test_each_turn_is_paid_what_it_adds_and_done_ends_the_rollout(made):
    (rollout,) = play(made, {"*": [search("a"), search("b"), search("c"), "never asked"]})
    assert [turn.result.score for turn in rollout.turns] == pytest.approx([1 / 3] * 3)
    assert (rollout.stop_reason, rollout.answer) == (StopReason.DONE, None)
    assert rollout.reward == pytest.approx(1.0)
    assert rollout.is_correct


def test_every_rollout_has_an_environment_of_its_own(made):
    script = {"q1/0": [search("a"), "x"], "q1/1": [search("a"), search("b"), "x"]}
    first, second = play(made, script, group_size=2)
    assert len(Counter.made) == 2
    assert (first.num_turns, second.num_turns) == (1, 2)
    assert [each.num_closed for each in Counter.made] == [1, 1]


def test_a_service_that_fails_begins_the_rollout_anew_in_a_fresh_environment(made):
    (rollout,) = play(made, {"*": [search("down"), search("a"), "x"]})
    assert rollout.num_turns == 1
    # The retry of the same call is refused, since nobody knows the state of a broken one.
    assert [each.num_searches for each in Counter.made] == [0, 1]
    assert [each.num_closed for each in Counter.made] == [1, 1]


def test_a_call_that_hangs_is_given_up_and_its_environment_closed(made):
    limits = AgentLimits(5, 200, 2000, tool_timeout_s=0.1, tool_retries=1)
    (rollout,) = play(made, {"*": [search("hang"), search("a"), "x"]}, limits=limits)
    assert rollout.num_turns == 1
    assert [each.num_closed for each in Counter.made] == [1, 1]


def test_environments_are_closed_when_a_phase_is_interrupted(made):
    _, loop = make_loop({"*": [search("a")] * 2 + ["x"]}, made, LIMITS, EnvironmentReward())

    def interrupt(counts):
        if counts.tokens:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.collect([question(), question("q2")], 2, interrupt)
    assert [each.num_closed for each in Counter.made] == [1] * 4


def test_an_environment_that_can_not_begin_leaves_its_rollout_out(made):
    class Broken(Counter):
        num_resets = 0

        def reset(self):
            Broken.num_resets += 1
            raise ValueError("no such level")

    with pytest.raises(
        RolloutError, match=r"opening of the tools in rollout q1/0: .*no such level"
    ):
        play(EnvironmentTools(Broken), {"*": ["x"]})
    assert Broken.num_resets == 4  # two attempts of the rollout, each tried again once
    assert all(each.num_closed for each in Counter.made)


def test_two_threads_never_share_an_environment(made):
    session = made.session(question())
    session.open()
    slow = threading.Thread(target=session.call, args=(ToolCall("search", {"query": "hang"}),))
    slow.start()
    time.sleep(0.1)
    with pytest.raises(RolloutError, match="has not ended"):
        session.call(ToolCall("search", {"query": "a"}))
    slow.join()
    assert session.call(ToolCall("search", {"query": "a"})).text == "search 2"
