"""A rollout as TensorBoard's text tab shows it: what was written, and nothing but text."""

import html
import re

import pytest
from agent_runs import TEMPLATE, run_one
from tensorboard.plugin_util import markdown_to_safe_html

from callbacks.rollout_samples import render_rollout
from trace_pl.types import ToolResult

MARKUP = [
    "<think>I search & find</think>",
    "&lt;think&gt;",
    "<script>alert(1)</script>",
    "<div onclick='x()'>\n\n</div>\n<!-- a comment that is never closed",
    "![pixel](http://tracker.test/x.png) [here](javascript:alert(1)) **bold** `code`",
    "```\nfence\n```\n~~~\n# heading\n- item\n\n    deeper\n| a | b |\n|---|---|\n| 1 | 2 |",
    "<?php\n<![CDATA[ x ]]>\n<img src=x onerror=alert(1)>",
]


def shown(text: str) -> tuple[str, set[str]]:
    """Return the text that TensorBoard shows, and the tags that it is made of."""
    page = markdown_to_safe_html(text)
    tags = set(re.findall(r"</?([a-z0-9]+)", page))
    return html.unescape(re.sub(r"</?(?:pre|code|p)>", "", page)), tags


@pytest.mark.parametrize("words", MARKUP)
def test_tensorboard_shows_what_policy_and_pages_wrote(words):
    call = '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>'
    rollout = run_one([f"<think>{words}</think>{call}", words], tools=lambda *_: ToolResult(words))
    text, tags = shown(render_rollout(rollout, TEMPLATE.decode, [0.25]))
    assert tags == {"p", "pre", "code"}
    told = "\n".join(line.strip() for line in text.splitlines() if line.strip())
    wanted = "\n".join(line.strip() for line in words.splitlines() if line.strip())
    assert told.count(wanted) == 3  # thought, page and final message
    assert f"turn 1, credit +0.250\n<think>{wanted}</think>" in told
