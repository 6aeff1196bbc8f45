"""Reading tool calls out of what the policy wrote."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from trace_pl.types import ToolCall


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """One assistant turn; exactly one of ``calls``, ``message`` and ``error`` is there."""

    calls: tuple[ToolCall, ...] = ()
    """Every call of the turn. Only the first is run; ``note`` tells the policy so."""
    message: str | None = None
    """What a turn without a call says after its thinking: it ends the rollout."""
    error: str | None = None
    """Why the turn cannot be used, as a text for the policy."""

    @property
    def note(self) -> str:
        """A line to put before the result of the first call; empty for a single call."""
        count = len(self.calls)
        return f"Only the first of {count} calls was run.\n" if count > 1 else ""


class ToolCallFormat(ABC):
    """How a family of models writes tool calls.

    A format reads one turn of the assistant: a call of a tool, a malformed one, or a final message.
    It never guesses, because what it reads is run; text inside thinking is no call. What the policy
    was shown of the tools is the chat template's, and only where that is silent the format's.
    """

    @abstractmethod
    def parse(
        self,
        text: str,
        thinking_open: bool = False,
        schemas: Sequence[Mapping[str, Any]] = (),
    ) -> ParsedTurn:
        """Read one assistant turn; never raises.

        Args:
            text: The turn with its special tokens, from after the generation header to before the
                end-of-turn token.
            thinking_open: Whether the generation header already opened the thinking block.
            schemas: JSON schemas of the tools, for formats that do not write types.
        """

    @abstractmethod
    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Return what a system prompt says of tools if the chat template says nothing.

        Args:
            schemas: JSON schemas of the tools.
        """


class HermesFormat(ToolCallFormat):
    """Qwen's format: ``<tool_call>`` around ``{"name": ..., "arguments": {...}}``.

    Only what follows the last thinking block is read: a call that the policy merely thinks of is
    not run. A malformed call spoils its turn, for arguments are never guessed. Of several calls the
    first is run.

    What deviates from the format is read where it can mean but one thing: newlines and tabs as they
    are inside a string, a Markdown fence around the object, arguments that are an object written as
    a string, ``parameters`` for ``arguments``, a turn that ends without the closing tag.
    """

    def parse(
        self,
        text: str,
        thinking_open: bool = False,
        schemas: Sequence[Mapping[str, Any]] = (),
    ) -> ParsedTurn:
        """Read one assistant turn; never raises."""
        return read_turn(text, thinking_open, _calls)

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Return what a system prompt says of tools if the chat template says nothing."""
        return (
            f"{listed(schemas)}\n\nTo call one, write a JSON object with its name and arguments:\n"
            '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
        )


class LlamaFormat(ToolCallFormat):
    """Llama 3's format: the turn is ``{"name": ..., "parameters": {...}}`` and nothing else.

    Only what follows the last thinking block is read. If that begins with a brace or with the
    python tag it is a call, whose arguments are never guessed. Of several calls, one after another
    or with semicolons between, the first is run. As in :class:`HermesFormat`, strings may hold
    newlines, and ``arguments`` may be written for ``parameters`` or as a string.
    """

    def parse(
        self,
        text: str,
        thinking_open: bool = False,
        schemas: Sequence[Mapping[str, Any]] = (),
    ) -> ParsedTurn:
        """Read one assistant turn; never raises."""
        return read_turn(text, thinking_open, _bare_calls)

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Return what a system prompt says of tools if the chat template says nothing."""
        return (
            f"{listed(schemas)}\n\nTo call one, write this JSON object and nothing else:\n"
            '{"name": <name>, "parameters": <object>}'
        )


def read_turn(
    text: str, thinking_open: bool, calls_in: Callable[[str], tuple[ToolCall, ...]]
) -> ParsedTurn:
    """Return what an assistant turn says after its last thinking block: calls, or a message.

    Args:
        text: The turn.
        thinking_open: Whether the generation header already opened the thinking block.
        calls_in: Returns the calls in a text, none for a message; a call that it cannot read is a
            :class:`MalformedCall`, which spoils the turn.
    """
    _, closed, visible = text.rpartition("</think>")
    if "<think>" in visible or (thinking_open and not closed):
        return ParsedTurn(error="Error: unclosed thinking block.")
    try:
        calls = calls_in(visible)
    except MalformedCall as problem:
        return ParsedTurn(error=f"Error: {problem} Nothing was run.")
    return ParsedTurn(calls=calls) if calls else ParsedTurn(message=visible)


def listed(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Return the schemas of tools as a system prompt shows them."""
    lines = "\n".join(json.dumps(schema) for schema in schemas)
    return f"# Tools\n\nThe signatures of the tools:\n<tools>\n{lines}\n</tools>"


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_FENCE = re.compile(r"```(?:json)?\s*")
_SPACE = re.compile(r"\s*")


class MalformedCall(Exception):
    """A tool call that cannot be read; the message is for the policy."""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise MalformedCall("the tool call gives the same name twice.")
    return found


# Not strict: a newline within a string can mean nothing else.
_DECODER = json.JSONDecoder(
    strict=False, parse_constant=_refuse_constant, object_pairs_hook=_unique
)


def _bare_calls(text: str) -> tuple[ToolCall, ...]:
    """Return the calls of a text that begins with one, in order."""
    found = text.strip()
    if not found.startswith(("{", _PYTHON_TAG)):
        return ()
    found = found.removeprefix(_PYTHON_TAG).lstrip()
    calls: list[ToolCall] = []
    while found:
        if calls and not found.startswith("{"):
            raise MalformedCall("other text follows the tool call.")
        value, end = decoded(found, 0)
        calls.append(_call(value, "parameters"))
        found = found[end:].lstrip("; \n")
    if not calls:
        raise MalformedCall("the tool call is empty.")
    return tuple(calls)


def _calls(text: str) -> tuple[ToolCall, ...]:
    """Return the calls in a text, in order.

    The JSON decoder, not the closing tag, decides where an object ends: a query may hold the tag.
    """
    calls: list[ToolCall] = []
    at = 0
    while (start := text.find(_OPEN, at)) >= 0:
        _refuse_stray_close(text[at:start])
        begin = after(_SPACE, text, start + len(_OPEN))
        inner = after(_FENCE, text, begin)
        if inner == len(text):
            raise MalformedCall("the tool call is empty.")
        value, end = decoded(text, inner)
        end = after(_SPACE, text, end)
        if inner > begin:
            if not text.startswith("```", end):
                raise MalformedCall("the fence in the tool call is not closed.")
            end = after(_SPACE, text, end + 3)
        # The policy ended its turn here, so nothing is missing but the tag.
        if end < len(text) and not text.startswith(_CLOSE, end):
            problem = (
                "is not closed" if text.startswith(_OPEN, end) else "holds more than its object"
            )
            raise MalformedCall(f"the tool call {problem}.")
        calls.append(_call(value, "arguments"))
        at = end + len(_CLOSE)
    _refuse_stray_close(text[at:])
    return tuple(calls)


def decoded(text: str, begin: int) -> tuple[object, int]:
    """Return the JSON value that begins at an index, and where it ends.

    Raises:
        MalformedCall: if there is none.
    """
    try:
        return _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "no JSON"
        raise MalformedCall(f"the tool call is not valid JSON ({reason}).") from error


def _call(value: object, key: str) -> ToolCall:
    if not isinstance(value, dict):
        raise MalformedCall("the tool call is not a JSON object.")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedCall('the tool call needs a text as "name".')
    given = [value[name] for name in ("arguments", "parameters") if name in value]
    arguments = given[0] if len(given) == 1 else None
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        # Servers give arguments as a string, and models repeat it.
        text = arguments.strip()
        arguments, end = decoded(text, 0)
        arguments = arguments if end == len(text) else None
    if not isinstance(arguments, dict):
        raise MalformedCall(f'the tool call needs an object as "{key}".')
    return ToolCall(name, arguments)


def _refuse_stray_close(text: str) -> None:
    if _CLOSE in text:
        raise MalformedCall("a tool call is closed that was not opened.")


def after(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return where a pattern that stands at an index ends; the index itself if it does not."""
    found = pattern.match(text, at)
    return found.end() if found else at
