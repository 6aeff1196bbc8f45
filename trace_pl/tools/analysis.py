"""Text to search terms, the same way for documents, queries and guards."""

from __future__ import annotations

import re
import unicodedata

import tantivy

from trace_pl.text import clean_text

ANALYSIS = "nfkc, casefold, ideographs apart, ascii folding, english stems, at most 64 letters"
"""What :func:`analyse` does, recorded beside a stored index: a change makes the index stale."""

_IDEOGRAPH = re.compile(r"([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")
_ANALYZER = (
    tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    .filter(tantivy.Filter.remove_long(64))
    .filter(tantivy.Filter.ascii_fold())
    .filter(tantivy.Filter.stemmer("english"))
    .build()
)


def analyse(text: str) -> list[str]:
    """Return the search terms of a text, in order, repeats included.

    Chinese and Japanese have no spaces between words, so each of their characters is a term.

    Args:
        text: Any Unicode.

    Returns:
        Terms without a space; none for a text of punctuation.
    """
    folded = unicodedata.normalize("NFKC", clean_text(text)).casefold()
    return _ANALYZER.analyze(_IDEOGRAPH.sub(r" \1 ", folded))
