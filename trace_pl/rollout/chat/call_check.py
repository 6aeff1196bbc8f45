"""Proof at the start that the configured format reads the calls that the chat template writes."""

from __future__ import annotations

import json
from typing import Any

from trace_pl.errors import ConfigError
from trace_pl.rollout.chat.call_formats import HermesFormat, LlamaFormat, ToolCallFormat
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.rollout.chat.xml_format import XmlFormat
from trace_pl.types import ToolCall

SHIPPED_FORMATS: tuple[type[ToolCallFormat], ...] = (HermesFormat, LlamaFormat, XmlFormat)
_VALUE = "zqVALUEqz"
_ID = "zqCALLqz1"  # of the only length that some templates accept


def check_calls(template: ChatTemplate, call_format: ToolCallFormat) -> None:
    """Render one call by the template and read it with the format.

    A policy writes calls as its template told it to, so a format that cannot read them gives
    rollouts without a turn. There is nothing to check if the template does not describe tools, for
    then the format's own description stands in the system prompt, nor if it shows no calls.

    Args:
        template: made with the tools.
        call_format: the configured format.

    Raises:
        ConfigError: if the format reads another call than was rendered, or none; it names the
            shipped format that does.
    """
    if not template.tools or not template.describes_tools:
        return
    call = _example(template.tools[0])
    shown = _shown(template, call)
    if not shown or any(_reads(call_format, text, call) for text in shown):
        return
    right = [f for f in SHIPPED_FORMATS if any(_reads(f(), text, call) for text in shown)]
    advice = "Write a class like trace_pl.rollout.HermesFormat, or use another model."
    if right:
        advice = f"Set `data.call_format` to trace_pl.rollout.{right[0].__name__}."
    raise ConfigError(
        f"Expected a call format that reads the calls of the chat template of '{template.name}', "
        f"such as {shown[0]!r}, got {type(call_format).__name__}, which does not. {advice}"
    )


def _example(schema: dict[str, Any]) -> ToolCall:
    """Return a call of a tool with a text that is found again in whatever is rendered."""
    function = schema.get("function", schema)
    names = list(function.get("parameters", {}).get("properties", {})) or ["query"]
    return ToolCall(str(function["name"]), {names[0]: _VALUE})


def _shown(template: ChatTemplate, call: ToolCall) -> list[str]:
    """Return the turns that the template makes of a call, by what it takes for content and call.

    Empty if it refuses calls or does not show them.
    """
    opening = template.opening("", "zqUSERqz")
    prompt = template.rendered(opening)
    header = template.decode(template.generation_header).rstrip().removesuffix("<think>").rstrip()
    turns = []
    for arguments in (dict(call.arguments), json.dumps(call.arguments)):
        for content in ("", None):
            function = {"name": call.name, "arguments": arguments}
            calls = [{"id": _ID, "type": "function", "function": function}]
            turn = {"role": "assistant", "content": content, "tool_calls": calls}
            try:
                text = template.rendered([*opening, turn])
            except ConfigError:
                continue
            if not text.startswith(prompt):
                continue
            text = text.removeprefix(prompt).removeprefix(header)
            for stop in template.stop_ids:
                text = text.partition(template.decode([stop]))[0]
            if _VALUE in text:
                turns.append(text.strip())
    return turns


def _reads(call_format: ToolCallFormat, text: str, call: ToolCall) -> bool:
    return call_format.parse(text).calls == (call,)
