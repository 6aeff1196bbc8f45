"""Where a rollout is cut into turns."""

from __future__ import annotations

import re
from bisect import bisect_left
from itertools import accumulate
from typing import Literal, get_args

from trace_pl.credit.boundaries import tool_call_boundaries
from trace_pl.credit.stages import Segmenter
from trace_pl.errors import ConfigError
from trace_pl.scoring.protocol import Template
from trace_pl.types import Boundaries, Rollout, TokenKind

ReasoningUnit = Literal["sentence", "paragraph"]

_UNIT_ENDS: dict[ReasoningUnit, re.Pattern[str]] = {
    "sentence": re.compile(r"(?:[.!?][\"')\]]*|[\u3002\uff01\uff1f])(?=\s)"),
    "paragraph": re.compile(r"\n[ \t]*\n\s*"),
}


class ToolCallSegmenter(Segmenter):
    """One turn is one tool call: a boundary after the prompt and after each observation."""

    def segment(self, rollout: Rollout, template: Template) -> Boundaries:
        """Return :func:`trace_pl.credit.boundaries.tool_call_boundaries` of ``rollout``."""
        return tool_call_boundaries(rollout)


class FixedTokenSegmenter(Segmenter):
    """One turn is a fixed number of sampled tokens, wherever that falls.

    Args:
        num_tokens: Sampled tokens of a turn, at least 1.

    Raises:
        ConfigError: if ``num_tokens`` is below 1.
    """

    def __init__(self, num_tokens: int = 256) -> None:
        _require_positive("num_tokens", num_tokens)
        self.num_tokens = num_tokens

    def segment(self, rollout: Rollout, template: Template) -> Boundaries:
        """Return a boundary after the prompt and after each full run of sampled tokens."""
        ends = (rollout.loss_mask.nonzero()[:, 0] + 1).tolist()
        return Boundaries(
            rollout.id, (rollout.prompt_length, *ends[self.num_tokens - 1 :: self.num_tokens])
        )


class ReasoningSegmenter(Segmenter):
    """One turn is a stretch of reasoning, cut at the ends of sentences or paragraphs.

    Meant for agents that think long and call few tools. Observations end a turn as well; what
    follows the end of thinking belongs to the call or answer that it leads to.

    Args:
        unit: What the stretches are made of.
        min_tokens: Tokens of a turn at least; shorter units are joined with the next.

    Raises:
        ConfigError: if ``unit`` is unknown or ``min_tokens`` below 1.
    """

    def __init__(self, unit: ReasoningUnit = "sentence", min_tokens: int = 32) -> None:
        if unit not in get_args(ReasoningUnit):
            raise ConfigError(
                f"Expected unit to be one of {list(get_args(ReasoningUnit))}, got '{unit}'. "
                "Change `credit.segmenter.init_args.unit`."
            )
        _require_positive("min_tokens", min_tokens)
        self.unit: ReasoningUnit = unit
        self.min_tokens = min_tokens

    def segment(self, rollout: Rollout, template: Template) -> Boundaries:
        """Return the boundaries after prompt, stretches of reasoning and observations."""
        fixed = tool_call_boundaries(rollout).prefix_ends
        ends = [rollout.prompt_length]
        for start, stop in zip(fixed, (*fixed[1:], len(rollout.token_ids)), strict=True):
            for end in self._unit_ends(rollout, template, start, stop):
                if end - ends[-1] >= self.min_tokens and end < stop:
                    ends.append(end)
            if stop in fixed:
                ends.append(stop)
        return Boundaries(rollout.id, tuple(ends))

    def _unit_ends(self, rollout: Rollout, template: Template, start: int, stop: int) -> list[int]:
        """Return the token counts at which a unit of thinking between two indices has ended."""
        sampled = [i for i in range(start, stop) if rollout.kinds[i] == TokenKind.ACTION]
        texts = [template.decode([int(rollout.token_ids[i])]) for i in sampled]
        thinking = "".join(texts).split("</think>")[0]
        # Characters written once each token is; a unit ends with the token that completes it.
        written = list(accumulate(map(len, texts)))
        found = _UNIT_ENDS[self.unit].finditer(thinking)
        return [sampled[bisect_left(written, match.end())] + 1 for match in found]


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(
            f"Expected {name} of at least 1, got {value}. "
            f"Change `credit.segmenter.init_args.{name}`."
        )
