import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_pl.rollout.chat.call_formats import HermesFormat, LlamaFormat, ParsedTurn
from trace_pl.types import ToolCall

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Arden"}}\n</tool_call>'
ARDEN = ToolCall("search", {"query": "Arden"})
LUND = CALL.replace("Arden", "Lund")


def parse(text, thinking_open=False):
    return HermesFormat().parse(text, thinking_open)


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"<think>\nHm.\n</think>\n\n{CALL}",
        f"I search.\n{CALL}\n",
        '<tool_call>{"arguments":{"query":"Arden"},"name":"search"}</tool_call>',
        f"<think>{LUND}</think>{CALL}",
        f"<think>a</think> b <think>{LUND}</think>{CALL}",
        f"<think>It is Lund.</think>{CALL}It is Lund.",
    ],
)
def test_the_call_after_the_thinking_block_is_read(text):
    assert parse(text) == ParsedTurn(calls=(ARDEN,))


def test_a_header_that_opened_the_block_needs_only_its_closing():
    assert parse(f"Hm. {LUND}\n</think>\n{CALL}", thinking_open=True).calls == (ARDEN,)


@pytest.mark.parametrize(
    ("text", "thinking_open"),
    [
        (f"<think>Hm. {CALL}", False),
        (f"Hm. {CALL}", True),
        ("It is Lund.", True),
        ("", True),
        (f"<think>a</think> b <think>{CALL}", False),
    ],
)
def test_an_unclosed_thinking_block_is_an_error_and_nothing_in_it_is_run(text, thinking_open):
    assert parse(text, thinking_open) == ParsedTurn(error="Error: unclosed thinking block.")


def test_several_calls_are_all_read_and_the_note_says_that_the_first_was_run():
    turn = parse(f"{CALL}\n{LUND}")
    assert turn.calls == (ARDEN, ToolCall("search", {"query": "Lund"}))
    assert turn.note == "Only the first of 2 calls was run.\n"
    assert parse(CALL).note == parse("hello").note == ""


def test_a_closing_tag_inside_a_json_string_does_not_end_the_call():
    query = "what is </tool_call> or <tool_call>?"
    text = f'<tool_call>{{"name": "search", "arguments": {{"query": "{query}"}}}}</tool_call>'
    assert parse(text).calls == (ToolCall("search", {"query": query}),)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"name": "search", "arguments": {"query": "Ar', "is not valid JSON"),
        ("{'name': 'search'}</tool_call>", "is not valid JSON"),
        ('{"name": "search", "arguments": {"query": NaN}}</tool_call>', "is not valid JSON"),
        ('{"name": "search", "arguments": ' + "[" * 100_000, "is not valid JSON"),
        ('{"name": "open", "arguments": {"id": ' + "1" * 5000 + "}}</tool_call>", "not valid JSON"),
        ("</tool_call>", "is not valid JSON"),
        ("", "is empty"),
        ("```json\n", "is empty"),
        ('["search"]</tool_call>', "is not a JSON object"),
        ('{"arguments": {}}</tool_call>', 'needs a text as "name"'),
        ('{"name": 3, "arguments": {}}</tool_call>', 'needs a text as "name"'),
        ('{"name": "", "arguments": {}}</tool_call>', 'needs a text as "name"'),
        ('{"name": "search"}</tool_call>', 'needs an object as "arguments"'),
        ('{"name": "search", "arguments": null}</tool_call>', 'needs an object as "arguments"'),
    ],
)
def test_a_malformed_call_is_an_error_that_names_the_problem_and_guesses_nothing(body, problem):
    turn = parse(f"<tool_call>{body}")
    assert (turn.calls, turn.message) == ((), None)
    assert problem in turn.error
    assert "<" not in turn.error


@pytest.mark.parametrize(
    "text",
    [
        f"{CALL}<tool_call>{{",
        f"{CALL}\n</tool_call>",
        '{"name": "search"}</tool_call>It is Lund.',
    ],
)
def test_one_malformed_call_spoils_the_turn(text):
    turn = parse(text)
    assert (turn.calls, turn.message) == ((), None)
    assert turn.error.startswith("Error: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<answer>Lund</answer>", "<answer>Lund</answer>"),
        ("<think>Arden</think>\n\nIt is Lund.", "\n\nIt is Lund."),
        ("<think>a</think> b <think>Arden</think>Lund", "Lund"),
        ("", ""),
    ],
)
@pytest.mark.parametrize("call_format", [HermesFormat(), LlamaFormat()])
def test_what_follows_the_thinking_block_of_a_turn_without_a_call_is_its_message(
    call_format, text, message
):
    assert call_format.parse(text) == ParsedTurn(message=message)


PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>", CALL, "{", '"',
     "}", '{"name": "a", "arguments": {}}', "[" * 3000, "\ud800", "\\u", " ", "\n"]
)  # fmt: skip


@given(st.lists(PIECES | st.text(st.characters(), max_size=5)).map("".join), st.booleans())
def test_no_text_makes_the_parser_raise_and_exactly_one_outcome_is_set(text, thinking_open):
    turn = parse(text, thinking_open)
    assert sum([bool(turn.calls), turn.message is not None, turn.error is not None]) == 1


# --- what deviates from the format: read where it can mean but one thing ---------------------

OBJECT = '{"name": "search", "arguments": {"query": "Arden"}}'
AS_TEXT = '{"name": "search", "arguments": "{\\"query\\": \\"Arden\\"}"}'
TWO_KEYS = '{"name": "search", "arguments": {"query": "a"}, "parameters": {"query": "b"}}'
TWICE = '{"name": "search", "arguments": {"query": "a", "query": "b"}}'
WRAPPED = '{"type": "function", "function": {"name": "search", "arguments": {}}}'
# What follows the opening tag, what vLLM's parser `hermes` makes of it, and the query that is
# searched for or the reason that the policy is told.
DECISIONS = {
    "as it should be": (f"\n{OBJECT}\n</tool_call>", "reads", "Arden"),
    "newline and tab in a string": (OBJECT.replace("Ard", "a\n\tb ") + "</tool_call>", "refuses",
        "a\n\tb en"),
    "fenced": (f"\n```json\n{OBJECT}\n```\n</tool_call>", "refuses", "Arden"),
    "fenced without a language": (f"```{OBJECT}```</tool_call>", "refuses", "Arden"),
    "arguments as a text": (f"{AS_TEXT}</tool_call>", "reads the text", "Arden"),
    "parameters": (OBJECT.replace("arguments", "parameters") + "</tool_call>", "refuses", "Arden"),
    "not closed at the end of the turn": (f"\n{OBJECT}\n", "reads", "Arden"),
    "not closed and fenced": (f"\n```json\n{OBJECT}\n```\n", "refuses", "Arden"),

    "not closed before words": (f"{OBJECT}\nI wait.", "refuses", "holds more than its object"),
    "half closed": (f"{OBJECT}\n</tool_call", "refuses", "holds more than its object"),
    "not closed before another": (f"{OBJECT}<tool_call>{OBJECT}</tool_call>", "refuses",
        "is not closed"),
    "two objects": (f"{OBJECT}\n{OBJECT}</tool_call>", "refuses", "holds more than its object"),
    "a brace too many": (OBJECT + "}</tool_call>", "refuses", "holds more than its object"),
    "a brace too few": (OBJECT[:-1] + "</tool_call>", "refuses", "is not valid JSON"),
    "closed twice": (f"{OBJECT}</tool_call></tool_call>", "reads", "was not opened"),
    "a fence that is not closed": (f"```json\n{OBJECT}\n</tool_call>", "refuses",
        "the fence in the tool call is not closed"),
    "words before": (f"I call {OBJECT}</tool_call>", "refuses", "is not valid JSON"),
    "a list": (f"[{OBJECT}]</tool_call>", "refuses", "is not a JSON object"),
    "wrapped as servers do": (f"{WRAPPED}</tool_call>", "refuses", 'needs a text as "name"'),
    "both keys": (f"{TWO_KEYS}</tool_call>", "reads one", 'needs an object as "arguments"'),
    "a name twice": (f"{TWICE}</tool_call>", "reads the last", "gives the same name twice"),
    "no arguments": ('{"name": "search"}</tool_call>', "refuses", "needs an object"),
    "arguments null": ('{"name": "search", "arguments": null}</tool_call>', "reads null",
        "needs an object"),
    "arguments as an empty text": ('{"name": "search", "arguments": ""}</tool_call>',
        "reads the text", "needs an object"),
    "arguments as other text": (AS_TEXT.replace(': "{', ': " [{') + "</tool_call>",
        "reads the text", "needs an object"),
    "arguments as half a text": (AS_TEXT.replace('}"', '"') + "</tool_call>", "reads the text",
        "is not valid JSON"),
    "arguments as two texts": (AS_TEXT.replace('}"', '} {}"') + "</tool_call>", "reads the text",
        "needs an object"),
    "single quotes": (OBJECT.replace('"', "'") + "</tool_call>", "refuses", "is not valid JSON"),
    "a comma too many": (OBJECT.replace("}}", ",}}") + "</tool_call>", "refuses",
        "is not valid JSON"),
    "not a number": (OBJECT.replace('"Arden"', "NaN") + "</tool_call>", "reads NaN",
        "is not valid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", DECISIONS)
def test_a_deviation_is_read_only_if_it_means_one_thing(case):
    body, _, expected = DECISIONS[case]
    turn = parse(f"Hm.\n<tool_call>{body}")
    if turn.error is None:
        assert turn == ParsedTurn(calls=(ToolCall("search", {"query": expected}),))
    else:
        assert expected in turn.error


# --- Llama -----------------------------------------------------------------------------------


def llama(text):
    return LlamaFormat().parse(text)


@pytest.mark.parametrize(
    "around", ["{}", " {}\n", "<|python_tag|>{}", "<think>{</think>\n{}", "{};"]
)
def test_a_llama_turn_that_is_one_object_is_a_call(around):
    call = '{"name": "search", "parameters": {"query": "a; b"}}'
    assert llama(around.replace("{}", call)).calls == (ToolCall("search", {"query": "a; b"}),)


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "search", "arguments": {"query": "a\nb"}}',
        '{"name": "search", "parameters": "{\\"query\\": \\"a\\\\nb\\"}"}',
    ],
)
def test_what_can_mean_but_one_thing_is_read_in_llama_calls_too(call):
    assert llama(call).calls == (ToolCall("search", {"query": "a\nb"}),)


@pytest.mark.parametrize("text", ['<think>{"name": "search", "parameters": {}}', "{"])
def test_a_llama_call_inside_thinking_is_not_run(text):
    assert LlamaFormat().parse(text, thinking_open=True).error == "Error: unclosed thinking block."


def test_several_llama_calls_are_read_one_after_the_other():
    call = '{"name": "open", "parameters": {"id": 1}}'
    parsed = llama(f"{call}; {call}\n{call}")
    assert parsed.calls == (ToolCall("open", {"id": 1}),) * 3
    assert parsed.note == "Only the first of 3 calls was run.\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "search"}', 'an object as "parameters"'),
        ('{"name": "search", "arguments": {}, "parameters": {}}', 'an object as "parameters"'),
        ('{"name": "search", "parameters": {"a": 1, "a": 2}}', "the same name twice"),
        ('{"name": "search", "parameters": {}} and more', "other text follows"),
        ('{"name": "search", "parameters": {"query"', "not valid JSON"),
        ("<|python_tag|>search(1)", "not valid JSON"),
        ("<|python_tag|>", "the tool call is empty"),
    ],
)
def test_a_malformed_llama_call_is_never_guessed(text, message):
    parsed = llama(text)
    assert message in parsed.error
    assert not parsed.calls


def test_a_llama_turn_of_words_is_a_message_even_if_it_mentions_a_call():
    text = 'I would call {"name": "search", "parameters": {}}. <answer> Mira Holt </answer>'
    assert llama(text) == ParsedTurn(message=text)


def test_a_llama_turn_that_never_ends_its_thinking_says_nothing():
    assert llama("<think>It is Lund.").error == "Error: unclosed thinking block."
    assert LlamaFormat().parse("It is Lund.", thinking_open=True).message is None


@pytest.mark.parametrize("call_format", [HermesFormat(), LlamaFormat()])
def test_a_description_holds_the_schemas_and_a_form_that_is_read_back(call_format):
    text = call_format.describe([{"name": "search"}, {"name": "open"}])
    assert '{"name": "search"}\n{"name": "open"}' in text
    form = text[text.rindex("<tool_call>" if "<tool_call>" in text else "{") :]
    if isinstance(call_format, LlamaFormat):
        form = text.splitlines()[-1]
    written = form.replace("<name>", '"open"').replace("<object>", '{"id": 1}')
    assert call_format.parse(written).calls == (ToolCall("open", {"id": 1}),)
