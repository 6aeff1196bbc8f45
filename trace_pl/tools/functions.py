"""Tools that are plain Python functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trace_pl.errors import ConfigError
from trace_pl.tools.described import DescribedTools
from trace_pl.tools.protocol import Toolbox, ToolSession
from trace_pl.types import Question, ToolCall, ToolResult


class FunctionTools(Toolbox):
    """Typed functions with Google docstrings, plain or ``async``.

    The schema is that of ``transformers.utils.get_json_schema``, and a call that does not fit it is
    answered to the policy with what is wrong. A function returns text, or what JSON can say, or a
    :class:`ToolResult`; it runs on several threads at once. An exception is told to the policy as
    an error, except an ``OSError``, which is tried again as `limits.tool_retries` says and then
    leaves the rollout out::

        data:
          tools:
            class_path: trace_pl.tools.FunctionTools
            init_args:
              functions: [my_tools.search, my_tools.calculate]

    Args:
        functions: the functions.
        max_characters: longest result that is shown whole.

    Raises:
        ConfigError: if there is no function, two have the same name, or one is not described.
    """

    def __init__(self, functions: list[Callable[..., Any]], max_characters: int = 20_000) -> None:
        names = [function.__name__ for function in functions]
        if len(set(names)) < len(names):
            raise ConfigError(f"Expected functions of different names as tools, got {names}.")
        self._tools = DescribedTools.of(dict(zip(names, functions, strict=True)), max_characters)

    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of the functions."""
        return self._tools.schemas

    def session(self, question: Question) -> FunctionSession:
        """Return the functions; they know nothing of the rollout."""
        return FunctionSession(self._tools)


class FunctionSession(ToolSession):
    """The functions as one rollout calls them."""

    def __init__(self, tools: DescribedTools) -> None:
        self._tools = tools

    def call(self, call: ToolCall) -> ToolResult:
        """Run a call; see :class:`FunctionTools`."""
        return self._tools.call(call)
