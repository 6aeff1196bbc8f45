import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_pl.tools.display import (
    FindablePage,
    Matches,
    cut_words,
    first_sentence,
    neutralise,
    page,
)


@pytest.mark.parametrize(
    "markup",
    [
        "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|any thing|>", "<\uff5cUser\uff5c>",
        "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
        "<think>", "</think>", "<answer>", "</answer>", "</THINK >",
    ],
)  # fmt: skip
def test_chat_markup_loses_its_bracket_and_nothing_else_changes(markup):
    assert neutralise(f"a {markup} b") == f"a &lt;{markup[1:]} b"
    assert neutralise(neutralise(markup)) == neutralise(markup)


@pytest.mark.parametrize("text", ["a < b", "<b>bold</b>", "<|", "x <| y", "<thinking>", "&lt;"])
def test_other_text_is_left_alone(text):
    assert neutralise(text) == text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Arden is a town. It is old.", "Arden is a town."),
        ("Arden\nis a town.\n\nIt is old.", "Arden is a town."),
        ("The U.S. Navy sailed. Then it stopped.", "The U.S. Navy sailed."),
        ("Dr. J. Holt built it. More.", "Dr. J. Holt built it."),
        ('He said "no." Then he left.', 'He said "no."'),
        ("It rose 3.5 m. More.", "It rose 3.5 m. More."),
        ("No stop at all", "No stop at all"),
        ("\u5317\u4eac\u3002\u4e0a\u6d77\u3002", "\u5317\u4eac\u3002"),
        ("one two three four five six seven. Eight.", "one two three four five six ..."),
        ("", ""),
    ],
)
def test_the_first_sentence_is_this(text, sentence):
    assert first_sentence(text, 6) == sentence


def test_a_page_within_its_limit_is_whole_and_a_longer_one_says_what_remains():
    assert page("Arden", "one two\nthree", 3) == "Arden: one two\nthree"
    assert page("Arden", "one two\nthree\nfour", 3) == (
        "Arden: one two\nthree\n[1 more line not shown; find(pattern) searches the whole page]"
    )
    assert page("Arden", "one two\nthree\n\nfour\nfive", 1) == (
        "Arden: one\n[5 more lines not shown; find(pattern) searches the whole page]"
    )


def test_text_without_spaces_can_not_slip_through_a_word_limit():
    assert len(cut_words("\u5317" * 100, 10)) == 10
    assert len(cut_words("x" * 1000, 10)) == 240


def test_find_sees_a_phrase_across_line_breaks_and_whatever_its_case_or_form():
    found = FindablePage("Intro.\nIt was built by\n  MIRA  Holt of Cafe\u0301 Noir.\nEnd.")
    expected = Matches(("line 2: It was built by MIRA Holt of Cafe\u0301 Noir.",), 0)
    assert found.find("by mira holt", 5, 50) == expected
    inner = Matches(("line 3: MIRA Holt of Cafe\u0301 Noir.",), 0)
    assert found.find("Caf\u00e9 NOIR", 5, 50) == inner
    assert found.find("\uff4dira", 5, 50) == inner


def test_find_shows_each_line_once_and_counts_the_rest():
    found = FindablePage("\n".join(f"line {n} has red and red" for n in range(9)))
    matches = found.find("red", 5, 50)
    assert matches.passages[0] == "line 1: line 0 has red and red"
    assert (len(matches.passages), matches.remaining) == (5, 4)


def test_find_in_a_long_line_shows_the_words_around_each_match():
    words = [f"w{n}" for n in range(300)]
    words[100] = words[200] = "target"
    matches = FindablePage(" ".join(words)).find("target", 5, 9)
    assert matches.passages == (
        "line 1: w97 w98 w99 target w101 w102 w103 w104 w105",
        "line 1: w197 w198 w199 target w201 w202 w203 w204 w205",
    )


@pytest.mark.parametrize("pattern", ["", "  ", "\n"])
def test_a_blank_pattern_matches_nothing(pattern):
    assert FindablePage("some text\nhere").find(pattern, 5, 50) == Matches((), 0)


@given(
    st.text(alphabet="ab \n\u00dfe\u0301\u5317\u1100\u1161\ufb01"),
    st.text(alphabet="ab sfi\u00dfe\u0301"),
)
def test_find_ends_for_any_text_and_never_shows_more_words_than_asked(text, pattern):
    matches = FindablePage(text).find(pattern, 2, 4)
    assert len(matches.passages) <= 2
    for passage in matches.passages:
        _, shown = passage.split(": ", maxsplit=1)
        assert cut_words(shown, 4 + len(pattern)) == shown


@given(st.text(alphabet="abcAB \n", min_size=1), st.data())
def test_every_piece_of_a_page_is_found_in_it(text, data):
    start = data.draw(st.integers(0, len(text) - 1))
    piece = text[start : start + 5]
    matches = FindablePage(text).find(piece, 5, 50)
    assert bool(matches.passages) is bool(piece.strip())
