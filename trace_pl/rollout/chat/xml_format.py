"""The calls of Qwen3-Coder, Qwen3.5 and Nemotron 3: a function and its parameters between tags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trace_pl.rollout.chat.call_formats import (
    MalformedCall,
    ParsedTurn,
    ToolCallFormat,
    after,
    decoded,
    listed,
    read_turn,
)
from trace_pl.types import ToolCall

_START = re.compile(r"<tool_call>\s*|(?=<function=)")
_FUNCTION = re.compile(r"<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")
_PARAMETER_CLOSE, _FUNCTION_CLOSE, _CLOSE = "</parameter>", "</function>", "</tool_call>"
_SPACE = re.compile(r"\s*")
_STRAY = re.compile(r"</(?:tool_call|function|parameter)>|<parameter=")
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_KINDS: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


class XmlFormat(ToolCallFormat):
    """``<function=name>`` with ``<parameter=key>value</parameter>``, in ``<tool_call>``.

    Only what follows the last thinking block is read. A value is a text: "1969" stays one, unless
    the tool's schema asks for another type and the text is JSON of that type. A malformed call
    spoils its turn, for arguments are never guessed; the tags ``<tool_call>`` before a function and
    ``</tool_call>`` at the end of the turn may be missing. Of several calls the first is run.
    """

    def parse(
        self,
        text: str,
        thinking_open: bool = False,
        schemas: Sequence[Mapping[str, Any]] = (),
    ) -> ParsedTurn:
        """Read one assistant turn; never raises."""
        return read_turn(text, thinking_open, lambda visible: _calls(visible, schemas))

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Return what a system prompt says of tools if the chat template says nothing."""
        return (
            f"{listed(schemas)}\n\nTo call one, write its name and each argument in this form:\n"
            "<tool_call>\n<function=name>\n<parameter=argument>\nvalue\n</parameter>\n"
            "</function>\n</tool_call>"
        )


def _calls(text: str, schemas: Sequence[Mapping[str, Any]]) -> tuple[ToolCall, ...]:
    """Return the calls in a text, in order."""
    calls: list[ToolCall] = []
    at = 0
    while start := _START.search(text, at):
        _refuse_stray(text[at : start.start()])
        call, end = _function(text, start.end(), schemas)
        calls.append(call)
        end = after(_SPACE, text, end)
        is_closed = text.startswith(_CLOSE, end)
        # The policy ended its turn here, so nothing is missing but the tag.
        if start.group() and not is_closed and end < len(text):
            raise MalformedCall("the tool call is not closed.")
        at = end + len(_CLOSE) * is_closed
    _refuse_stray(text[at:])
    return tuple(calls)


def _function(text: str, at: int, schemas: Sequence[Mapping[str, Any]]) -> tuple[ToolCall, int]:
    """Return the call that begins at an index, and where its function is closed."""
    opened = _FUNCTION.match(text, at)
    if opened is None:
        raise MalformedCall("the tool call does not begin with the name of a function.")
    types = _types(opened[1].strip(), schemas)
    arguments: dict[str, Any] = {}
    at = opened.end()
    while parameter := _PARAMETER.match(text, at):
        end = text.find(_PARAMETER_CLOSE, parameter.end())
        if end < 0:
            raise MalformedCall("a parameter of the tool call is not closed.")
        key = parameter[1].strip()
        if key in arguments:
            raise MalformedCall("the tool call gives the same name twice.")
        written = text[parameter.end() : end].removeprefix("\n").removesuffix("\n")
        arguments[key] = _value(written, types.get(key, ()))
        at = after(_SPACE, text, end + len(_PARAMETER_CLOSE))
    if not text.startswith(_FUNCTION_CLOSE, at):
        raise MalformedCall("the function in the tool call is not closed, or holds other text.")
    return ToolCall(opened[1].strip(), arguments), at + len(_FUNCTION_CLOSE)


def _types(name: str, schemas: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return the JSON types of a tool's arguments, where its schema names them."""
    for schema in schemas:
        function = schema.get("function", schema)
        if function.get("name") == name:
            found = function.get("parameters", {}).get("properties", {})
            return {key: _named(field) for key, field in found.items()}
    return {}


def _named(field: object) -> tuple[str, ...]:
    """Return the types that a field of a schema allows; none if it does not name them."""
    if not isinstance(field, Mapping):
        return ()
    if "anyOf" in field:
        return tuple(kind for choice in field["anyOf"] for kind in _named(choice))
    kinds = field.get("type", ())
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def _value(written: str, types: tuple[str, ...]) -> object:
    """Return a text as the type that a schema asks for; the text itself where it is none."""
    if not types or "string" in types:
        return written
    text = written.strip()
    if text.lower() in _WORDS:  # templates show Python's True and None
        value: object = _WORDS[text.lower()]
    else:
        try:
            value, end = decoded(text, 0)
        except MalformedCall:
            return written
        if end < len(text):
            return written
    for kind in types:
        is_bool = isinstance(value, bool)
        if isinstance(value, _KINDS.get(kind, ())) and is_bool == (kind == "boolean"):
            return value
    return written


def _refuse_stray(text: str) -> None:
    if _STRAY.search(text):
        raise MalformedCall("a tool call is closed that was not opened.")
