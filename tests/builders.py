"""Small builders shared by the tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trace_pl.types import (
    Question,
    Rollout,
    RolloutGroup,
    StopReason,
    TokenKind,
    ToolCall,
    ToolResult,
    Turn,
)

P, A, T = TokenKind.PROMPT, TokenKind.ACTION, TokenKind.TEMPLATE


def question(number: int = 0) -> Question:
    """Return a question with an invented answer."""
    return Question(f"q{number}", f"Where is {number}?", (f"Town {number}",))


def rollout(
    index: int = 0,
    turns: Sequence[tuple[int, int]] = ((3, 2),),
    final: int = 2,
    prompt: int = 4,
    reward: float = 0.0,
    of: Question | None = None,
    seed: int = 0,
    is_correct: bool | None = None,
) -> Rollout:
    """Return a rollout of ``turns`` (action tokens, observation tokens) and a final answer.

    It is right if ``is_correct`` says so, or if nothing is said and the reward is positive.
    """
    generator = torch.Generator().manual_seed(1000 * seed + index)
    kinds = [P] * prompt
    spans = []
    for action, observation in turns:
        start = len(kinds) + 1
        kinds += [T] + [A] * action + [T] + [TokenKind.OBSERVATION] * observation + [T]
        spans.append((start, start + action, len(kinds)))
    kinds += [T] + [A] * final
    kinds_T = torch.tensor([int(k) for k in kinds], dtype=torch.uint8)
    sampled = kinds_T == TokenKind.ACTION
    call, result = ToolCall("search", {"query": "x"}), ToolResult("nothing")
    return Rollout(
        question=of or question(),
        index=index,
        token_ids=torch.randint(3, 60, (len(kinds),), generator=generator),
        kinds=kinds_T,
        logprobs=-torch.rand(len(kinds), generator=generator) * sampled,
        prompt_length=prompt,
        turns=tuple(Turn(*span, call, result) for span in spans),
        stop_reason=StopReason.ANSWERED,
        answer="x",
        reward=reward,
        is_correct=reward > 0.0 if is_correct is None else is_correct,
        policy_version=0,
    )


def group(rewards: Sequence[float], number: int = 0) -> RolloutGroup:
    """Return a ragged group with these rewards."""
    asked = question(number)
    rollouts = tuple(
        rollout(i, turns=[(2 + i, 3)] * (i % 3 + 1), reward=r, of=asked, seed=number)
        for i, r in enumerate(rewards)
    )
    return RolloutGroup(asked, rollouts)
