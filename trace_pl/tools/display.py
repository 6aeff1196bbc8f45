"""How documents look to the policy: snippets, pages cut to a budget, matches in a page."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import cached_property, lru_cache

# A word is one ideograph or a run of at most 24 other characters: text without spaces, Chinese or
# base64, must not slip through a limit that counts words.
_IDEOGRAPHS = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\s{_IDEOGRAPHS}]{{1,24}}")

# A stop ends a sentence unless it follows a single letter (an initial, "U.S.") or a title ("Dr.").
_SENTENCE = re.compile(
    r".*?(?:(?<!\b[^\W\d_])(?<!\b[A-Z][a-z])(?<!\bMrs)[.!?][\"')\]\u2019\u201d]*(?=\s)"
    r"|[\u3002\uff01\uff1f])"
)

_CONTROL = re.compile(
    r"<(?=[|\uff5c][^<>]*[|\uff5c]>|/?(?:tool_call|tool_response|think|answer)\s*>)", re.IGNORECASE
)


def neutralise(text: str) -> str:
    """Return text in which no chat markup is left: its ``<`` becomes ``&lt;``, all else stays.

    A page that holds ``<|im_end|>`` or ``</tool_response>`` could otherwise end the turn and speak
    as another role.
    """
    return _CONTROL.sub("&lt;", text)


def cut_words(text: str, limit: int) -> str:
    """Return the first ``limit`` words of a text with the spacing they came in."""
    for count, word in enumerate(_WORD.finditer(text)):
        if count == limit:
            return text[: word.start()].rstrip()
    return text


def one_line(text: str, limit: int) -> str:
    """Return a text as one line of at most ``limit`` words, with "..." where it was cut."""
    line = " ".join(text.split())
    cut = cut_words(line, limit)
    return cut if cut == line else f"{cut} ..."


def first_sentence(text: str, limit: int) -> str:
    """Return the first sentence of a text as one line of at most ``limit`` words."""
    line = " ".join(cut_words(text, limit + 1).split())
    sentence = _SENTENCE.match(line)
    return one_line(sentence[0] if sentence else line, limit)


def page(title: str, text: str, limit: int) -> str:
    """Return ``Title: text``, cut after ``limit`` words of the text.

    A cut page ends with a line that says how many lines remain and how to reach them.
    """
    shown = cut_words(text, limit)
    head = f"{title}: {shown}"
    if shown == text:
        return head
    rest = text[len(shown) :].strip().count("\n") + 1
    lines = "1 more line" if rest == 1 else f"{rest} more lines"
    return f"{head}\n[{lines} not shown; find(pattern) searches the whole page]"


@dataclass(frozen=True, slots=True)
class Matches:
    """Where a pattern stands in a page."""

    passages: tuple[str, ...]
    """``line N: text``, at most as many as were asked for."""
    remaining: int
    """Passages beyond those."""


class FindablePage:
    """A page for literal search regardless of case, Unicode form and line breaks.

    Args:
        text: The whole page; it is prepared in the first search.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    @cached_property
    def _fold(self) -> tuple[str, list[int]]:
        return _fold_with_offsets(self._text)

    def find(self, pattern: str, limit: int, context_words: int) -> Matches:
        """Return the passages around the matches of ``pattern``.

        A passage is the line of the match (its lines, when it crosses a break), or the words around
        it when that is longer than ``context_words``. Further matches in it are not repeated.

        Args:
            pattern: Literal text; blank never matches.
            limit: Passages at most.
            context_words: Words of a passage at most.
        """
        folded, offsets = self._fold
        needle = _fold_with_offsets(pattern)[0].strip()
        passages: list[str] = []
        remaining = 0
        at = folded.find(needle) if needle else -1
        while at >= 0:
            start, end = offsets[at], offsets[at + len(needle)]
            line = self._text.count("\n", 0, start) + 1
            begin, stop = self._passage(start, end, context_words)
            if len(passages) < limit:
                passages.append(f"line {line}: {' '.join(self._text[begin:stop].split())}")
            else:
                remaining += 1
            after = at + len(needle)
            while offsets[after] < stop:
                after += 1
            at = folded.find(needle, after)
        return Matches(tuple(passages), remaining)

    def _passage(self, start: int, end: int, words: int) -> tuple[int, int]:
        """Return the span of the lines around a match, narrowed to ``words`` words."""
        begin = self._text.rfind("\n", 0, start) + 1
        stop = self._text.find("\n", end)
        stop = len(self._text) if stop < 0 else stop
        spans = [m.span() for m in _WORD.finditer(self._text, begin, stop)]
        if len(spans) <= words:
            return begin, stop
        first = next(i for i, (_, word_end) in enumerate(spans) if word_end > start)
        first = max(0, min(first - words // 3, len(spans) - words))
        return spans[first][0], max(end, spans[first + words - 1][1])


def _fold_with_offsets(text: str) -> tuple[str, list[int]]:
    """Return the folded text, and the offset in ``text`` of each of its characters and its end."""
    if text.isascii() and "\n" not in text and "\t" not in text and "  " not in text:
        return text.lower(), list(range(len(text) + 1))
    pieces: list[str] = []
    offsets: list[int] = []
    for match in _CLUSTER.finditer(text):
        folded = _fold_cluster(match[0])
        pieces.append(folded)
        offsets.extend([match.start()] * len(folded))
    return "".join(pieces), [*offsets, len(text)]


# A run of spaces, or a character with the marks and Hangul parts that may compose with it.
_CLUSTER = re.compile(
    r"\s+|\S[\u0300-\u036f\u0483-\u0487\u0591-\u05bd\u064b-\u065f\u0670\u093c\u1160-\u11ff"
    r"\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\u3099\u309a\ufe20-\ufe2f]*"
)


@lru_cache(maxsize=4096)
def _fold_cluster(cluster: str) -> str:
    if cluster.isspace():
        return " "
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", cluster).casefold())
