"""Text from outside, made fit to be encoded, tokenised and indexed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NEWLINES = re.compile(r"\r\n?|[\v\f\x85\u2028\u2029]")
_CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def clean_text(text: str) -> str:
    r"""Return text with ``\n`` as its only newline, without control characters or lone surrogates.

    All other Unicode is kept: a lone surrogate alone cannot be encoded, tokenised or indexed.
    """
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text  # nearly every text, in a fifth of the time
    return _CONTROLS.sub("", _NEWLINES.sub("\n", text))


def clean_texts(value: Any) -> Any:  # noqa: ANN401  (whatever a user's row or task holds)
    """Return a value with :func:`clean_text` of every text in it, names of objects included."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, Mapping):
        return {clean_texts(name): clean_texts(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(clean_texts, value))
    return value
