r"""What a model, a tool or a page says, made safe once: where it enters the record.

Whatever reads a record later (tokenizers, files, TensorBoard, logs) can rely on text that can be
encoded, and on arguments that are JSON. A lone surrogate, which an escape such as ``\ud83d`` in a
call makes, would otherwise end the run there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trace_pl.errors import RolloutError
from trace_pl.text import clean_text
from trace_pl.types import ToolCall, ToolResult

_MAX_DEPTH = 32


class UnsafeCall(Exception):
    """A call that cannot be written down as it was meant; the message is for the policy."""


def clean_call(call: ToolCall) -> ToolCall:
    """Return a call whose every text is cleaned, the names of its arguments included.

    Raises:
        UnsafeCall: if cleaning would change what it means, or its arguments are no finite JSON.
    """
    name = clean_text(call.name)
    if not name:
        raise UnsafeCall('the tool call needs a text as "name".')
    return ToolCall(name, _clean_object(call.arguments, 1))


def require_result(result: object, tool: str) -> ToolResult:
    """Return what a tool gave back if it is a result.

    Raises:
        RolloutError: if it is anything else, which is a fault of the tool and not of the policy.
    """
    if not isinstance(result, ToolResult) or not isinstance(result.text, str):
        got = f"one with {result.text!r}" if isinstance(result, ToolResult) else repr(result)
        raise RolloutError(f"Expected a ToolResult with a text from tool '{tool}', got {got[:80]}.")
    if result.score is not None and not math.isfinite(result.score):
        raise RolloutError(f"Expected a finite score from tool '{tool}', got {result.score}.")
    return result


def clean_result(result: ToolResult) -> ToolResult:
    """Return a result whose every text is cleaned."""
    return replace(
        result,
        text=clean_text(result.text),
        error=None if result.error is None else clean_text(result.error),
        docids=tuple(map(clean_text, result.docids)),
        opened=tuple(map(clean_text, result.opened)),
    )


def _clean_object(value: Mapping[str, Any], depth: int) -> dict[str, Any]:
    _require_depth(depth)
    cleaned = {clean_text(name): _clean_value(item, depth + 1) for name, item in value.items()}
    if len(cleaned) < len(value):
        raise UnsafeCall("two arguments of the tool call have the same name.")
    return cleaned


def _clean_value(value: object, depth: int) -> object:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, Mapping):
        return _clean_object(value, depth)
    if isinstance(value, list | tuple):
        _require_depth(depth)
        return [_clean_value(item, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise UnsafeCall("a number of the tool call is too large.")
    return value


def _require_depth(depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise UnsafeCall(f"the arguments are nested more than {_MAX_DEPTH} levels deep.")
