import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_pl.tasks.matching import exact_match, normalize_answer


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("  The   Eiffel\n Tower. ", "eiffel tower"),
        ("Caf\u00e9", "caf\u00e9"),
        ("Cafe\u0301", "caf\u00e9"),
        ("U.S.", "us"),
        ("**Mira Holt**", "mira holt"),
        ("`Mira Holt`", "mira holt"),
        ("\u201cMira Holt\u201d", "mira holt"),
        ("O\u2019Brien", "obrien"),
        ("O'Brien", "obrien"),
        ("\uff21\uff22\uff11", "ab1"),
        ("Stra\u00dfe", "strasse"),
        ("mira\u00a0holt\u200b", "mira holt"),
        ("\u041c\u043e\u0441\u043a\u0432\u0430!", "\u043c\u043e\u0441\u043a\u0432\u0430"),
        ("\u300c\u5317\u4eac\u300d\u3002", "\u5317\u4eac"),
        ("\u0645\u0635\u0631\u061f", "\u0645\u0635\u0631"),
        ("\u0939\u093f\u0928\u094d\u0926\u0940", "\u0939\u093f\u0928\u094d\u0926\u0940"),
        ("1,000", "1000"),
        ("1,2,3", "1 2 3"),
        ("3.5", "3.5"),
        ("3.5.", "3.5"),
        ("3-1", "3 1"),
        ("3\u20131", "3 1"),
        ("12:30", "12 30"),
        ("-5", "-5"),
        ("\u22125", "-5"),
        ("$5", "$5"),
        ("C++", "c++"),
        ("e-mail", "email"),
        ("Theodore an Athens", "theodore athens"),
        ("A", "a"),
        ("?!", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_an_answer_has_this_normal_form(text, normalized):
    assert normalize_answer(text) == normalized


@pytest.mark.parametrize(
    ("prediction", "answers", "matches"),
    [
        ("the United States", ["USA", "United States"], True),
        ("caf\u00e9 noir", ["Cafe\u0301 Noir"], True),
        ("\u5317\u4eac", ["\u4e0a\u6d77"], False),
        ("\u041c\u043e\u0441\u043a\u0432\u0430", ["\u043c\u043e\u0441\u043a\u0432\u0430"], True),
        ("Mira Holt of Arden", ["Mira Holt"], False),
        ("35", ["3.5"], False),
        ("31", ["3-1"], False),
        ("5", ["-5"], False),
        (None, ["Mira"], False),
        ("", [""], False),
        ("...", ["!"], False),
        ("Mira", [], False),
    ],
)
def test_a_prediction_matches_only_a_gold_answer_of_the_same_content(prediction, answers, matches):
    assert exact_match(prediction, answers) is matches


@given(st.text())
def test_normalising_again_changes_nothing_that_matching_depends_on(text):
    once = normalize_answer(text)
    assert once == once.strip()
    assert exact_match(text, [text]) is bool(once)
