"""Whatever a model or a tool says goes through the loop, the record and every file."""

import json

import pytest
from agent_runs import ANSWER, TEMPLATE, run_one
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from callbacks.rollout_samples import render_rollout
from callbacks.rollout_writer import rollout_record
from trace_pl.errors import RolloutError
from trace_pl.rollout.clean import UnsafeCall, clean_call, clean_result
from trace_pl.rollout.trajectory import AgentLimits
from trace_pl.types import Question, ToolCall, ToolResult

ROOMY = {"limits": AgentLimits(max_response_tokens=20_000), "max_model_len": 49_152}
TEXTS = st.text(st.characters(), max_size=8) | st.sampled_from(["\ud83d", "\udc00x", "\x00", "\r"])
JSON = st.recursive(
    TEXTS | st.integers() | st.floats() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def called(name, arguments):
    """A response that calls a tool; every odd character of it is an escape."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@settings(deadline=None, max_examples=150)
@given(
    name=TEXTS.filter(bool),
    arguments=st.dictionaries(TEXTS, JSON, max_size=3),
    page=TEXTS,
    error=st.none() | TEXTS,
    docid=TEXTS,
    words=st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
def test_any_text_reaches_the_files(tmp_path_factory, name, arguments, page, error, docid, words):
    rollout = run_one(
        [called(name, arguments), f"<answer>{words}</answer>"],
        tools=lambda *_: ToolResult(page, error, (docid,)),
        **ROOMY,
    )
    (turn,) = rollout.turns
    assert turn.result.error == "parse" or turn.call.name
    path = tmp_path_factory.mktemp("out") / "rollouts.jsonl"
    record = rollout_record(rollout, TEMPLATE)
    path.write_text(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
    assert json.loads(path.read_text("utf-8")) == record
    render_rollout(rollout, TEMPLATE.decode, [0.0]).encode()


def test_the_text_of_a_rollout_with_half_an_emoji_reaches_tensorboard(tmp_path):
    rollout = run_one(
        [called("search", {"query": "ship \ud83d"}), ANSWER],
        tools=lambda *_: ToolResult("\udc00 x"),
    )
    assert rollout.turns[0].call == ToolCall("search", {"query": "ship "})
    assert rollout.turns[0].result == ToolResult(" x")
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("rollout/0", render_rollout(rollout, TEMPLATE.decode, [0.0]), 0)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tensors("rollout/0/text_summary")


@pytest.mark.parametrize(
    ("result", "got"),
    [("a page", "'a page'"), (None, "None"), (ToolResult(None), "one with None")],
)
def test_a_tool_that_gives_no_result_has_failed_and_is_named(result, got):
    with pytest.raises(RolloutError, match=f"with a text from tool 'search', got {got}"):
        run_one([called("search", {"query": "x"})] * 3, tools=lambda *_: result)


def test_the_tool_is_given_what_the_record_says():
    seen = []

    def tool(question, call, number):
        seen.append(call)
        return ToolResult("a page")

    arguments = {"a\ud83d": ["x\ud83d", {"b\x00": "\r\n"}], "n": 1.5}
    rollout = run_one([called("search\x07", arguments), ANSWER], tools=tool)
    assert seen == [ToolCall("search", {"a": ["x", {"b": "\n"}], "n": 1.5})]
    assert rollout.turns[0].call == seen[0]


def test_a_failure_of_a_tool_is_told_in_text_that_can_be_written(caplog):
    def tool(question, call, number):
        raise OSError("no file 'a\udc80b'")

    with pytest.raises(Exception, match="no file 'ab'"):
        run_one([called("search", {"query": "x"})] * 3, tools=tool)
    caplog.text.encode()


def test_a_question_of_any_task_is_cleaned_with_its_free_fields():
    odd = Question(
        "q\ud83d", "Who\x00?", ("Mira\udc00",), {"no\ud83d": [("a\ud83d", 1)], "evidence": ["d0"]}
    )
    assert odd == Question("q", "Who?", ("Mira",), {"no": [("a", 1)], "evidence": ["d0"]})


def nested(depth):
    return {"a": nested(depth - 1)} if depth > 1 else {}


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (ToolCall("\ud83d", {}), 'a text as "name"'),
        (ToolCall("search", {"query": "a", "query\ud83d": "b"}), "have the same name"),
        (ToolCall("search", {"query": [{"a": 1, "\x00a": 2}]}), "have the same name"),
        (ToolCall("search", {"query": float("inf")}), "too large"),
        (ToolCall("search", nested(33)), "more than 32 levels"),
        (ToolCall("search", nested(900)), "more than 32 levels"),
    ],
)
def test_a_call_that_cleaning_would_change_in_meaning_is_not_run(call, problem):
    with pytest.raises(UnsafeCall, match=problem):
        clean_call(call)
    rollout = run_one(
        [called(call.name, call.arguments), ANSWER],
        tools=lambda *_: pytest.fail("a spoilt call was run"),
        **ROOMY,
    )
    assert rollout.turns[0].result.error == "parse"


def test_clean_calls_and_results_stay_as_they_are():
    call = ToolCall(
        "search", {"query": "\u00e9\U0001f6a2\n\t", "n": [1, None, True], "o": nested(31)}
    )
    assert clean_call(call) == call
    result = ToolResult("a\tpage\n", "tool", ("d0", "d1"), ("d1",))
    assert clean_result(result) == result
