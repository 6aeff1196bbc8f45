"""The frozen data that flows from question to token advantage.

Shape letters used across the project: B rows of a minibatch, T tokens of one rollout, G rollouts
of one question, N tool turns of one rollout, V vocabulary. Values live *at boundaries* (N + 1),
credit lives *on turns* (N). Log-probabilities are natural logs (nats) in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from trace_pl.errors import CreditError, DataError
from trace_pl.text import clean_texts


class TokenKind(IntEnum):
    """Who wrote a token. Only ``ACTION`` tokens were sampled from the policy and carry loss."""

    PROMPT = 0
    ACTION = 1
    OBSERVATION = 2
    TEMPLATE = 3


class StopReason(StrEnum):
    """Why a rollout ended."""

    ANSWERED = "answered"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The trajectory reached its own token limit."""
    LENGTH = "length"
    """One response reached the limit for a single response."""
    DONE = "done"
    """The environment came to its end."""
    TOOL_FAILURE = "tool_failure"
    """Too many tool errors in a row."""
    INFRASTRUCTURE = "infrastructure"
    """The engine or a tool service failed; the policy is not to blame."""
    REWARD_FAILURE = "reward_failure"
    """The reward failed or took too long, so nobody knows what the rollout is worth."""
    DEADLINE = "deadline"
    """The rollout took too long by the clock, which says as much about the machine, the tools and
    the neighbours as about the policy. The policy answers for its turns and tokens."""

    @property
    def counts(self) -> bool:
        """Whether the rollout says something about the policy, so may enter group statistics."""
        return self not in (
            StopReason.INFRASTRUCTURE,
            StopReason.REWARD_FAILURE,
            StopReason.DEADLINE,
        )


@dataclass(frozen=True, slots=True)
class Question:
    """One task: a question with one reward at the end."""

    id: str
    text: str
    answers: tuple[str, ...]
    """Accepted gold answers; the first is canonical, the others are aliases."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Free facts about the question; ``evidence`` alone is read, see :attr:`evidence`."""

    def __post_init__(self) -> None:
        # A task may take them from anywhere; tokenizers and files take no lone surrogates.
        for name in ("id", "text", "answers", "meta"):
            object.__setattr__(self, name, clean_texts(getattr(self, name)))
        if not self.text.strip():
            raise DataError(f"Expected a question text in question '{self.id}', got an empty one.")
        if not self.answers or any(not answer.strip() for answer in self.answers):
            raise DataError(
                f"Expected at least one non-empty gold answer in question '{self.id}', got "
                f"{list(self.answers)!r}. Add the answer or drop the row."
            )
        evidence = self.meta.get("evidence")
        is_list = evidence is None or isinstance(evidence, list | tuple)
        if not is_list or not all(map(_is_docid, evidence or ())):
            raise DataError(
                f"Expected a list of docids (texts or whole numbers) as evidence of question "
                f"'{self.id}', got {evidence!r}. Correct it or drop the field."
            )

    @property
    def evidence(self) -> tuple[str, ...]:
        """Docids of the pages that are needed to answer, as texts; empty if unknown."""
        return tuple(str(docid) for docid in self.meta.get("evidence") or ())


def _is_docid(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the policy wrote it; ``name`` is empty when the call could not be parsed."""

    name: str
    arguments: Mapping[str, Any]


TOOL_ERRORS = ("parse", "unknown_tool", "arguments", "timeout", "tool")
"""Kinds of failure of a tool call."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool gave back. Errors are text for the policy, never exceptions."""

    text: str
    error: str | None = None
    """One of :data:`TOOL_ERRORS`."""
    docids: tuple[str, ...] = ()
    """Documents that this result shows to the policy, be it only by a line."""
    opened: tuple[str, ...] = ()
    """Those of them that it shows in full."""
    score: float | None = None
    """What the environment pays for this turn; None where it pays for none."""
    done: bool = False
    """Whether the environment has come to its end, which ends the rollout."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One tool turn: an action and the observation it brought, as token spans of the record."""

    action_start: int
    action_stop: int
    """End of the sampled tokens (exclusive), the end-of-turn token included."""
    observation_stop: int
    """End of the observation message (exclusive), its closing template tokens included."""
    call: ToolCall
    result: ToolResult


@dataclass(frozen=True, slots=True)
class Grade:
    """What a reward says of a finished rollout."""

    reward: float
    """What training compares among the rollouts of a question; finite."""
    is_correct: bool
    """Whether the answer is right, whatever else the reward pays for."""


@dataclass(frozen=True, eq=False)
class Rollout:
    """One finished trajectory: the append-only token record and what happened in it."""

    question: Question
    index: int
    """Position in the group, 0 .. G-1."""
    token_ids: Tensor
    """(T,) int64, exactly the ids that were sampled or appended."""
    kinds: Tensor
    """(T,) uint8 of :class:`TokenKind`."""
    logprobs: Tensor
    """(T,) float32, sampling log-prob in nats on ACTION tokens, 0 elsewhere."""
    prompt_length: int
    """Tokens of the prompt alone: the end of S_0."""
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    answer: str | None
    """Text of the final answer, None when the policy gave none."""
    reward: float
    is_correct: bool
    """Whether the answer is right, as the reward says; not whether ``reward`` is large."""
    policy_version: int
    experts: Tensor | None = None
    """(T, N layers, K) int16, the experts that read each token when it was sampled from, -1 where
    that is not known; None if the engine did not record them."""
    opening: str = ""
    """What the tools said in the prompt, right after the question."""

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.kinds), len(self.logprobs)}
        if len(lengths) != 1:
            raise CreditError(
                f"Expected ids, kinds and log-probs of one length in rollout {self.id}, got "
                f"{len(self.token_ids)}, {len(self.kinds)} and {len(self.logprobs)}."
            )

    @property
    def id(self) -> str:
        """Name of this rollout in messages: question id and group position."""
        return f"{self.question.id}/{self.index}"

    @property
    def loss_mask(self) -> Tensor:
        """(T,) bool, true on sampled tokens."""
        return self.kinds == TokenKind.ACTION

    @property
    def num_turns(self) -> int:
        """Number of completed tool turns (N)."""
        return len(self.turns)


@dataclass(frozen=True, eq=False)
class RolloutGroup:
    """The G countable rollouts of one question, all from one policy version."""

    question: Question
    rollouts: tuple[Rollout, ...]

    @property
    def rewards(self) -> Tensor:
        """(G,) float32 outcome rewards."""
        return torch.tensor([rollout.reward for rollout in self.rollouts], dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Where the N + 1 prefixes S_0 .. S_N of one rollout end."""

    rollout_id: str
    prefix_ends: tuple[int, ...]
    """Strictly increasing token counts; S_k is ``token_ids[:prefix_ends[k]]``."""

    def __post_init__(self) -> None:
        ends = self.prefix_ends
        if not ends or ends[0] < 1 or any(b <= a for a, b in pairwise(ends)):
            raise CreditError(
                f"Expected strictly increasing prefix ends from 1 up in rollout {self.rollout_id}, "
                f"got {list(ends)}."
            )

    @property
    def num_turns(self) -> int:
        """Number of transitions (N)."""
        return len(self.prefix_ends) - 1


@dataclass(frozen=True, eq=False)
class ProbeValues:
    """How ready the prober is to give the gold answer, at each boundary."""

    rollout_id: str
    mean_logprobs: Tensor
    """(N + 1,) float32, mean log-prob of the gold answer's tokens, in nats."""
    values: Tensor
    """(N + 1,) float32, transformed readiness; the first is exactly 0."""


@dataclass(frozen=True, eq=False)
class TurnCredit:
    """One number for each turn."""

    rollout_id: str
    credit: Tensor
    """(N,) float32, in nats."""
    num_steps: int = 1
    """How many turns ahead the backup looked (K); an anchor lets the outcome reach as far back."""
    discount: float = 1.0
    """How the backup discounted a turn (gamma)."""


@dataclass(frozen=True, eq=False)
class TokenAdvantages:
    """The advantage of every token, and the parts it was made of."""

    rollout_id: str
    advantages: Tensor
    """(T,) float32, zero off the sampled tokens."""
    outcome_advantage: float
    turn_rewards: Tensor
    """(N,) float32, anchored turn rewards r_k; zeros for an outcome-only anchor."""
