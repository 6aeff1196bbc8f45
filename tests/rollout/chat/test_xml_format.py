import pytest
from agent_runs import LIMITS, question
from conftest import make_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from scripted import FunctionTools, ScriptedEngine

from trace_pl.rollout.agent import AgentLoop
from trace_pl.rollout.chat.call_formats import ParsedTurn
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.rollout.chat.xml_format import XmlFormat
from trace_pl.tasks.rewards import ExactMatchReward
from trace_pl.types import ToolCall, ToolResult

FIELDS = {
    "query": {"type": "string"},
    "id": {"type": ["integer", "string"]},
    "top": {"type": "integer"},
    "share": {"type": "number"},
    "exact": {"type": "boolean"},
    "filter": {"type": "object"},
    "years": {"type": "array"},
    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "any": {},
    "odd": True,
}
SCHEMAS = [
    {"type": "function", "function": {"name": "open", "parameters": {}}},
    {"type": "function", "function": {"name": "search", "parameters": {"properties": FIELDS}}},
]


def call(*parameters, name="search"):
    """The text of a call as Qwen's own template writes it."""
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def parse(text, thinking_open=False):
    return XmlFormat().parse(text, thinking_open, SCHEMAS)


ARDEN = call(("query", "Arden"))
READ = ToolCall("search", {"query": "Arden"})


@pytest.mark.parametrize(
    "text",
    [
        ARDEN,
        f"<think>\nHm. {call(('query', 'Lund'))}</think>\n\nI search.\n{ARDEN}\n",
        ARDEN.replace("\n", ""),
        ARDEN.removesuffix("</tool_call>"),  # the turn ends here
        ARDEN.removeprefix("<tool_call>\n"),  # as Qwen3-Coder often does
        ARDEN.removeprefix("<tool_call>\n").removesuffix("</tool_call>"),
    ],
)
def test_a_call_after_the_thinking_is_read(text):
    assert parse(text) == ParsedTurn(calls=(READ,))


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("query", "1969", "1969"),
        ("query", "true", "true"),
        ("query", " a\n\n b ", " a\n\n b "),
        ("query", '{"a": 1}', '{"a": 1}'),
        ("query", "a < b </x> <parameter", "a < b </x> <parameter"),
        ("id", "3", "3"),  # a text is allowed, so it stays what was written
        ("any", "3", "3"),
        ("odd", "3", "3"),
        ("unknown", "3", "3"),
        ("top", " 3 ", 3),
        ("top", "3.5", "3.5"),
        ("top", "three", "three"),
        ("top", "true", "true"),
        ("share", "3", 3),
        ("share", "0.5", 0.5),
        ("share", "NaN", "NaN"),
        ("exact", "true", True),
        ("exact", "False", False),
        ("exact", "1", "1"),
        ("filter", '{"year": [1969]}', {"year": [1969]}),
        ("filter", "[1]", "[1]"),
        ("years", "[1969, 1970]", [1969, 1970]),
        ("years", "[1969", "[1969"),
        ("years", "[1969] x", "[1969] x"),
        ("years", '[{"a": 1, "a": 2}]', '[{"a": 1, "a": 2}]'),
        ("limit", "None", None),
        ("limit", "7", 7),
        ("query", "", ""),
    ],
)
def test_a_value_is_a_text_unless_the_schema_asks_for_another_type_that_it_is(key, written, value):
    (found,) = parse(call((key, written))).calls
    assert found.arguments == {key: value}
    assert type(found.arguments[key]) is type(value)


def test_a_call_without_parameters_and_one_of_an_unknown_tool_are_read():
    assert parse(call(name="open")).calls == (ToolCall("open", {}),)
    assert parse(call(("a", "1"), name="close")).calls == (ToolCall("close", {"a": "1"}),)


def test_several_calls_are_all_read():
    turn = parse(f"{ARDEN}\n{call(('query', 'Lund'), ('top', '2'))}")
    assert turn.calls == (READ, ToolCall("search", {"query": "Lund", "top": 2}))
    assert turn.note == "Only the first of 2 calls was run.\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>", "does not begin with the name of a function"),
        ('<tool_call>{"name": "search", "arguments": {}}</tool_call>', "does not begin with"),
        ("<tool_call><function=></function></tool_call>", "does not begin with"),
        ("<function=search", "does not begin with"),
        (ARDEN.split("\n</parameter>")[0], "a parameter of the tool call is not closed"),
        (ARDEN.split("\n</function>")[0], "the function in the tool call is not closed"),
        (ARDEN.replace("<parameter", "words <parameter"), "or holds other text"),
        (call(("query", "a </parameter> b")), "or holds other text"),
        (call(("query", "a"), ("query", "b")), "gives the same name twice"),
        (ARDEN.removesuffix("</tool_call>") + "I wait.", "the tool call is not closed"),
        (ARDEN + "</tool_call>", "closed that was not opened"),
        ("<parameter=query>x</parameter>", "closed that was not opened"),
        (f"{ARDEN}<tool_call>", "does not begin with"),
    ],
)
def test_a_malformed_call_is_an_error_that_names_the_problem_and_guesses_nothing(text, problem):
    turn = parse(text)
    assert (turn.calls, turn.message) == ((), None)
    assert problem in turn.error
    assert turn.error.startswith("Error: ")


def test_thinking_that_is_not_closed_is_an_error_and_nothing_in_it_is_run():
    assert parse(ARDEN, thinking_open=True).error == "Error: unclosed thinking block."


def test_a_rollout_calls_its_tools_with_the_types_of_their_schemas():
    template = ChatTemplate(make_tokenizer(), SCHEMAS)
    engine = ScriptedEngine(template, {"*": [call(("query", "3"), ("top", "3")), ""]})
    tools = FunctionTools(lambda *_: ToolResult("a page"))
    loop = AgentLoop(engine, template, tools, XmlFormat(), ExactMatchReward(), LIMITS)
    (rollout,) = loop.collect([question()], 1)[0].rollouts
    assert rollout.turns[0].call == ToolCall("search", {"query": "3", "top": 3})


def test_a_turn_of_words_is_a_message():
    assert parse("<think>a</think>It is Lund, not </b>.") == ParsedTurn(
        message="It is Lund, not </b>."
    )


def test_the_description_holds_the_schemas_and_a_form_that_is_read_back():
    text = XmlFormat().describe(SCHEMAS)
    assert '"name": "search"' in text
    form = text[text.rindex("<tool_call>") :]
    written = form.replace("=name", "=search").replace("=argument", "=top").replace("value", "3")
    assert parse(written).calls == (ToolCall("search", {"top": 3}),)


PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=search>", "</function>",
     "<parameter=top>", "</parameter>", "<function=", "3", "[" * 3000, ARDEN, "\ud800", "\n"]
)  # fmt: skip


@given(st.lists(PIECES | st.text(st.characters(), max_size=5)).map("".join), st.booleans())
def test_no_text_makes_the_parser_raise_and_exactly_one_outcome_is_set(text, thinking_open):
    turn = parse(text, thinking_open)
    assert sum([bool(turn.calls), turn.message is not None, turn.error is not None]) == 1
