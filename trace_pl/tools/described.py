"""Python functions as tools: their schema, and a call of one with what the policy wrote."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from transformers.utils.chat_template_utils import get_json_schema

from trace_pl.errors import ConfigError, one_line
from trace_pl.text import clean_text
from trace_pl.tools.display import neutralise
from trace_pl.types import ToolCall, ToolResult

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class DescribedTools:
    """Functions by name, with the schemas that their signatures and docstrings give.

    Args:
        functions: the functions by the name that the policy calls them by.
        schemas: their schemas, in the same order.
        max_characters: longest result that is shown whole.
    """

    functions: Mapping[str, Function]
    schemas: list[dict[str, Any]]
    max_characters: int

    @classmethod
    def of(cls, functions: Mapping[str, Function], max_characters: int) -> DescribedTools:
        """Describe functions.

        Raises:
            ConfigError: if there is none, or one lacks type hints or a description of an argument.
        """
        if not functions:
            raise ConfigError("Expected at least one function to be a tool, got none.")
        return cls(functions, [_schema(n, f) for n, f in functions.items()], max_characters)

    def call(self, call: ToolCall) -> ToolResult:
        """Run a call on this thread.

        What the policy did wrong, and what the function raises, is told to it. Failures of the
        machine and the network (``OSError``) are raised: the policy is not to blame for them.
        """
        schema = next((s for s in self.schemas if s["function"]["name"] == call.name), None)
        if schema is None:
            known = ", ".join(self.functions)
            return self._failure("unknown_tool", f"unknown tool '{call.name[:40]}'. Tools: {known}")
        parameters = {**schema["function"]["parameters"], "additionalProperties": False}
        faults = sorted(Draft202012Validator(parameters).iter_errors(call.arguments), key=str)
        if faults:
            place = ".".join(str(part) for part in faults[0].absolute_path)
            where = f"argument '{place}'" if place else "the arguments"
            fault = f"{where} of {call.name}: {faults[0].message[:200]}"
            return self._failure("arguments", fault)
        try:
            result = self.functions[call.name](**call.arguments)
            if inspect.isawaitable(result):
                result = asyncio.run(_wait_for(result))
        except OSError:
            raise
        except Exception as error:  # it is foreign code, and its words may help the policy
            return self._failure("tool", f"{type(error).__name__}: {one_line(error)}")
        return self._shown(result)

    def _shown(self, result: object) -> ToolResult:
        if isinstance(result, ToolResult):
            return result
        if result is None:
            return ToolResult("Done.")
        text = (
            result
            if isinstance(result, str)
            else json.dumps(result, default=str, ensure_ascii=False)
        )
        return ToolResult(self._safe(text))

    def _failure(self, kind: str, message: str) -> ToolResult:
        return ToolResult(self._safe(f"Error: {message}"), error=kind)

    def _safe(self, text: str) -> str:
        shown = text[: self.max_characters]
        rest = len(text) - len(shown)
        more = f"\n[{rest} more characters]" if rest else ""
        return neutralise(clean_text(shown)) + more


async def _wait_for(result: Any) -> Any:  # noqa: ANN401  (asyncio.run takes coroutines alone)
    return await result


def _schema(name: str, function: Function) -> dict[str, Any]:
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # of its own kinds, or of evaluating annotations
        raise ConfigError(
            f"Expected type hints and a Google docstring of the tool '{name}', got: "
            f"{one_line(error)} Describe each argument under `Args:`."
        ) from error
    schema["function"]["name"] = name
    return schema
