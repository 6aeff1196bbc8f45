"""Exact match of a predicted with a gold answer, after normalising both."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

_ARTICLES = frozenset({"a", "an", "the"})
_THOUSANDS_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
# Signs that NFKC leaves apart from the ones people type.
_LOOKALIKES = str.maketrans({"\u2212": "-", "\u2044": "/"})


def normalize_answer(text: str) -> str:
    """Return the form in which answers are compared.

    NFKC and casefold; punctuation, quote-like signs and invisible characters removed; English
    articles dropped; spaces squeezed. Letters, marks and digits of every script stay, so an answer
    in any language keeps its content. Between two digits punctuation carries meaning: the decimal
    point stays, a thousands comma goes, anything else parts the numbers ("3-1" is not "31"). A
    minus sign before a number stays.

    Deviation: the paper says only "normalised exact match". The common normaliser deletes all ASCII
    punctuation, which makes "3.5" equal to "35" and "-5" equal to "5".

    Args:
        text: A predicted or gold answer.

    Returns:
        The normalised answer; empty if nothing but punctuation was there. Articles stay when the
        answer is nothing else ("A" is an answer).
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    folded = _THOUSANDS_COMMA.sub("", folded.translate(_LOOKALIKES))
    before, after = " " + folded, folded[1:] + " "
    kept = "".join(map(_keep, folded, before, after))
    words = kept.split()
    return " ".join([word for word in words if word not in _ARTICLES] or words)


def exact_match(prediction: str | None, answers: Sequence[str]) -> bool:
    """Return whether the prediction equals any accepted answer after normalising.

    Args:
        prediction: What the policy answered; None when it gave no answer.
        answers: Accepted gold answers.

    Returns:
        True on a match. What is empty after normalising never matches, not even an empty gold.
    """
    if prediction is None:
        return False
    normalized = normalize_answer(prediction)
    return bool(normalized) and any(normalized == normalize_answer(gold) for gold in answers)


def token_f1(prediction: str | None, answers: Sequence[str]) -> float:
    """Return the best F1 of the prediction's words with those of an accepted answer, in 0 .. 1.

    Words are those of :func:`normalize_answer`; one that occurs twice has to be there twice, as in
    the evaluation of SQuAD.

    Args:
        prediction: What the policy answered; None when it gave no answer.
        answers: Accepted gold answers.
    """
    words = Counter(normalize_answer(prediction or "").split())
    return max((_f1(words, Counter(normalize_answer(gold).split())) for gold in answers), default=0)


def _f1(words: Counter[str], gold: Counter[str]) -> float:
    total = words.total() + gold.total()
    return 2.0 * (words & gold).total() / total if total else 0.0


def _keep(char: str, before: str, after: str) -> str:
    """Return what stays of one character, given its neighbours."""
    category = unicodedata.category(char)
    if category[0] == "Z" or char.isspace():
        return " "
    if category[0] == "C" or category == "Sk":
        return ""
    if category[0] != "P":
        return char
    if before.isdigit() and after.isdigit():
        return char if char == "." else " "
    if char == "-" and after.isdigit() and not before.isalnum():
        return char
    return ""
