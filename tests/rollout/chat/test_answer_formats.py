import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentParser

from trace_pl.rollout.chat.answer_formats import (
    AnswerFormat,
    AnswerTags,
    BoxedAnswer,
    ExactAnswerLines,
)

TAGS, LINES, BOX = FORMATS = (AnswerTags(), ExactAnswerLines(), BoxedAnswer())


@pytest.mark.parametrize(
    ("message", "tags", "lines", "box"),
    [
        ("**Paris**", None, None, None),
        ("It is Paris.", None, None, None),
        ("", None, None, None),
        ("It is <answer>Paris</answer>.", "Paris", None, None),
        (r"So \boxed{Paris}.", None, None, "Paris"),
        ("Exact Answer: Paris", None, "Paris", None),
        # Several: the last complete one.
        ("<answer>Rome</answer> no, <answer>Paris</answer>", "Paris", None, None),
        ("<answer>Paris</answer> or <answer>Ro", "Paris", None, None),
        (r"\boxed{Rome}, no, \boxed{Paris}, or \boxed{Ro", None, None, "Paris"),
        ("Exact Answer: Rome\nExact Answer: Paris\n", None, "Paris", None),
        # Nested: the innermost.
        ("<answer>Rome <answer>Paris</answer></answer>", "Paris", None, None),
        (r"\boxed{Rome \boxed{Paris}}", None, None, "Paris"),
        # Empty: an answer that cannot be right.
        ("<answer></answer>", "", None, None),
        (r"\boxed{}", None, None, ""),
        ("Exact Answer:\nConfidence: 90%", None, "", None),
        # Cut off.
        ("<answer>Paris", None, None, None),
        (r"\boxed{Paris", None, None, None),
        (r"\boxed{a { b}", None, None, None),
        ("<answer>\n Paris \n</answer>", "Paris", None, None),
    ],
)
def test_each_format_reads_its_own_form_and_no_other(message, tags, lines, box):
    assert [format_.read(message) for format_ in FORMATS] == [tags, lines, box]


@pytest.mark.parametrize(
    "message",
    [
        "Explanation: it is there.\nExact Answer: Paris\nConfidence: 90%",
        "**Exact Answer:** Paris",
        "**Exact Answer**: Paris",
        "**Exact Answer: Paris**",
        "**Exact Answer:** **Paris**",
        "__Exact Answer__ : `Paris`",
        "### Exact answer: *Paris*",
        "- exact  answer:Paris  \r\n- Confidence: 90%",
        "> Exact Answer\uff1aParis",
        "\u2022 EXACT ANSWER: Paris",
    ],
)
def test_markdown_and_colons_around_an_exact_answer_are_not_part_of_it(message):
    assert LINES.read(message) == "Paris"


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ("Exact Answer: 12:30", "12:30"),
        ("The exact answer: Paris", None),
        ("Exact Answer is Paris", None),
        ("Exact Answer: -5 C", "-5 C"),
    ],
)
def test_an_exact_answer_is_all_that_follows_the_first_colon_of_its_line(message, answer):
    assert LINES.read(message) == answer


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\text{Paris}}", "Paris"),
        (r"\boxed{ \textbf{ Paris } }", "Paris"),
        (r"\boxed{\text{5} m}", r"\text{5} m"),
        (r"\boxed{a \} b}", r"a \} b"),
        (r"\boxed {Paris}", "Paris"),
        (r"\\boxed{Paris}", "Paris"),
        (r"} { \boxed{Paris}", "Paris"),
    ],
)
def test_a_box_ends_at_its_own_brace(message, answer):
    assert BOX.read(message) == answer


@pytest.mark.parametrize("format_", FORMATS, ids=lambda format_: type(format_).__name__)
@pytest.mark.parametrize(
    "gold", ["Paris", "-3.5", "12:30", "Saint-Denis (93)", "a, b; c", "{1, 2}"]
)
def test_what_the_prober_asks_for_is_what_is_read_and_what_the_prompt_shows(format_, gold):
    assert format_.read(format_.write(gold)) == gold
    assert format_.write(gold).startswith(format_.opening + gold)
    assert format_.opening.strip() in format_.instruction
    assert format_.closing.split(":")[0].strip() in format_.instruction


PIECES = ["<answer>", "</answer>", "\\boxed{", "\\", "{", "}", "Exact Answer:", "*", "\n", " "]


@given(st.lists(st.sampled_from(PIECES) | st.text(st.characters(), max_size=3)).map("".join))
def test_no_message_makes_a_format_raise(message):
    for format_ in FORMATS:
        answer = format_.read(message)
        assert answer is None or answer in message


@pytest.mark.parametrize("piece", [*PIECES, "<answer>x", "\\boxed{x", "\\boxed"])
def test_a_long_message_takes_no_more_than_linear_time(piece):
    for format_ in FORMATS:
        format_.read(piece * 100_000)


@pytest.mark.parametrize(
    ("config", "kind", "instruction"),
    [
        (
            "trace_pl.rollout.BoxedAnswer",
            BoxedAnswer,
            BoxedAnswer.default_instruction,
        ),
        (
            {
                "class_path": "trace_pl.rollout.AnswerTags",
                "init_args": {"instruction": ""},
            },
            AnswerTags,
            "",
        ),
    ],
)
def test_a_config_picks_the_format_by_class_path(config, kind, instruction):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--answer_format", type=AnswerFormat | None)
    chosen = parser.instantiate(parser.parse_object({"answer_format": config})).answer_format
    assert (type(chosen), chosen.instruction) == (kind, instruction)
