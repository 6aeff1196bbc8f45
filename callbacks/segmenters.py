"""Where a rollout is cut into turns."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, get_args

from trace_pl.credit.boundaries import tool_call_boundaries
from trace_pl.credit.stages import Segmenter
from trace_pl.errors import ConfigError
from trace_pl.probes import Template
from trace_pl.types import Boundaries, Rollout, TokenKind

ReasoningUnit = Literal["sentence", "paragraph"]

_OPEN, _CLOSE = "<think>", "</think>"

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
    """One turn is a number of sampled tokens, and as many more as it takes to a sensible place.

    A turn ends only where the policy might as well answer: inside its thinking, or after an
    observation. One that fills up within a call, an answer or other visible text goes on to the
    observation that follows; a policy that does not think has no other ends.

    Args:
        num_tokens: Sampled tokens of a turn at least, at least 1.

    Raises:
        ConfigError: if ``num_tokens`` is below 1.
    """

    def __init__(self, num_tokens: int = 256) -> None:
        _require_positive("num_tokens", num_tokens)
        self.num_tokens = num_tokens

    def segment(self, rollout: Rollout, template: Template) -> Boundaries:
        """Return a boundary after the prompt and at the first sensible place after each run."""
        ends = [rollout.prompt_length]
        sampled = rollout.loss_mask.cumsum(0).tolist()
        done = 0
        for message in _messages(rollout):
            thinking = _thinking(rollout, template, message)
            for end in [*thinking.ends, *message.observation_end]:
                if sampled[end - 1] - done >= self.num_tokens:
                    ends.append(end)
                    done = sampled[end - 1]
        return Boundaries(rollout.id, tuple(ends))


class ReasoningSegmenter(Segmenter):
    """One turn is a stretch of thinking, cut at the ends of sentences or paragraphs.

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
        """Return the boundaries after prompt, stretches of thinking and observations."""
        ends = [rollout.prompt_length]
        for message in _messages(rollout):
            for end in self._unit_ends(_thinking(rollout, template, message)):
                if end - ends[-1] >= self.min_tokens:
                    ends.append(end)
            ends += message.observation_end
        return Boundaries(rollout.id, tuple(ends))

    def _unit_ends(self, thinking: _Thinking) -> list[int]:
        """Return the token counts at which a unit of thinking has ended."""
        found = _UNIT_ENDS[self.unit].finditer(thinking.text)
        # A unit ends with the token that completes it.
        places = [bisect_left(thinking.written, match.end()) for match in found]
        return [thinking.ends[at] for at in places if at < len(thinking.ends)]


@dataclass(frozen=True, slots=True)
class _Message:
    """What the policy wrote between two observations, its header included, as token indices."""

    start: int
    stop: int
    observation_end: tuple[int, ...]
    """End of the observation that follows; empty after the last message."""


@dataclass(frozen=True, slots=True)
class _Thinking:
    """The first thinking block of a message, and the places in it where a probe makes sense."""

    text: str
    written: list[int]
    """Characters of ``text`` that are there at each place, rising."""
    ends: list[int]
    """Token counts of the places: after a sampled token that is not the message's last."""


def _messages(rollout: Rollout) -> list[_Message]:
    fixed = tool_call_boundaries(rollout).prefix_ends
    turns = [_Message(start, stop, (stop,)) for start, stop in pairwise(fixed)]
    return [*turns, _Message(fixed[-1], len(rollout.token_ids), ())]


def _thinking(rollout: Rollout, template: Template, message: _Message) -> _Thinking:
    """Return the places in a message's thinking block, wherever it was opened.

    Beyond it a probe would stand in the middle of a call or an answer, and close thinking that is
    not open.
    """
    kinds = rollout.kinds[message.start : message.stop].tolist()
    sampled = [message.start + i for i, kind in enumerate(kinds) if kind == TokenKind.ACTION]
    if not sampled:
        return _Thinking("", [], [])
    header = template.decode(rollout.token_ids[message.start : sampled[0]].tolist())
    ids = rollout.token_ids[sampled].tolist()
    words = {id_: template.decode([id_]) for id_ in set(ids)}  # long thinking repeats most of them
    texts = [words[id_] for id_ in ids]
    before, opened, rest = (header + "".join(texts)).partition(_OPEN)
    if not opened or before[len(header) :].strip():  # a tag within other text opens nothing
        return _Thinking("", [], [])
    thinking = rest.partition(_CLOSE)[0]
    begin = len(before) + len(_OPEN) - len(header)
    written = [length - begin for length in accumulate(map(len, texts))]
    # The last token may be the end of the message, and nothing of it follows.
    places = [
        (length, i + 1)
        for length, i in zip(written[:-1], sampled, strict=False)
        if 0 < length <= len(thinking)
    ]
    return _Thinking(thinking, [length for length, _ in places], [end for _, end in places])


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(
            f"Expected {name} of at least 1, got {value}. "
            f"Change `credit.segmenter.init_args.{name}`."
        )
