"""What the tools take, and how what a model writes is fitted to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trace_pl.text import clean_text


class ArgumentError(Exception):
    """Arguments that do not fit; the message is for the policy."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of one required argument."""

    name: str
    description: str
    argument: str
    types: str | tuple[str, ...]
    """JSON types of the argument."""
    hint: str
    """What the argument means."""

    @property
    def signature(self) -> str:
        """``search(query)``."""
        return f"{self.name}({self.argument})"

    def schema(self) -> dict[str, Any]:
        """Return the function schema that chat templates print."""
        types = self.types if isinstance(self.types, str) else list(self.types)
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    "type": "object",
                    "properties": {self.argument: {"type": types, "description": self.hint}},
                    "required": [self.argument],
                },
            },
        }

    def value(self, arguments: Mapping[str, Any]) -> str:
        """Return the argument as text: 1969 as "1969", 3.0 as "3".

        Raises:
            ArgumentError: if it is missing, null, blank or of another type, or is not alone.
        """
        others = [name for name in arguments if name != self.argument]
        if others:
            name = str(others[0])[:40]
            raise ArgumentError(f"{self.signature} takes no argument '{name}'.")
        value = arguments.get(self.argument)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18:
            value = str(value)
        if not isinstance(value, str) or not clean_text(value).strip():
            raise ArgumentError(f"{self.signature} needs a text or number as {self.argument}.")
        return clean_text(value).strip()


SEARCH = Tool("search", "Search the pages.", "query", "string", "words to look for")
OPEN = Tool(
    "open", "Open a search result.", "id", ("integer", "string"), "number in the newest results"
)
FIND = Tool("find", "Find a phrase on the open page.", "pattern", "string", "literal phrase")
TOOLS = {tool.name: tool for tool in (SEARCH, OPEN, FIND)}
