"""The token record of one rollout: append-only, and the only source of every mask and span."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trace_pl.errors import RolloutError
from trace_pl.types import (
    Grade,
    Question,
    Rollout,
    StopReason,
    TokenKind,
    ToolCall,
    ToolResult,
    Turn,
)


class TokenRecord:
    """Collects the tokens of one rollout as they come into being.

    What the engine sampled is stored as ids and never decoded and encoded again, so the sampler,
    the trainer and the prober all read the same tokens.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.kinds: list[int] = []
        self.logprobs: list[float] = []
        self.turns: list[Turn] = []
        self.prompt_length = 0
        self.opening = ""
        self.experts: Tensor | None = None
        """What the newest completion said of all tokens read for it."""
        self._action = (0, 0)

    def __len__(self) -> int:
        """Return the number of tokens so far."""
        return len(self.token_ids)

    def append(
        self, ids: Sequence[int], kind: TokenKind, logprobs: Sequence[float] | None = None
    ) -> None:
        """Append tokens of one kind.

        Args:
            ids: token ids, possibly none.
            kind: who wrote them.
            logprobs: sampling log-probs in nats, one per id; for ACTION tokens only.

        Raises:
            RolloutError: if log-probs are missing, superfluous, not finite or of another length.
        """
        assert kind is not TokenKind.PROMPT or self.prompt_length == len(self), "prompt comes first"
        is_action = kind is TokenKind.ACTION
        given = -1 if logprobs is None else len(logprobs)
        if given != (len(ids) if is_action else -1):
            raise RolloutError(
                f"Expected one sampling log-prob for each of {len(ids)} ACTION tokens and none for "
                f"other kinds, got {max(given, 0)} for {kind.name}. Check the engine."
            )
        if logprobs is not None and not all(map(math.isfinite, logprobs)):
            raise RolloutError(
                "Expected finite sampling log-probs, got a non-finite one at token "
                f"{len(self)} or later. Check the policy's weights for NaN or infinity."
            )
        start = len(self)
        self.token_ids.extend(ids)
        self.kinds.extend([int(kind)] * len(ids))
        self.logprobs.extend([0.0] * len(ids) if logprobs is None else logprobs)
        if is_action:
            self._action = (start, len(self))
        elif kind is TokenKind.PROMPT:
            self.prompt_length = len(self)

    def close_turn(self, call: ToolCall, result: ToolResult) -> None:
        """Mark everything since the newest action as its observation, which ends a tool turn."""
        start, stop = self._action
        assert stop < len(self), "a turn needs an observation after its action"
        assert not self.turns or self.turns[-1].observation_stop <= start, "one turn per action"
        self.turns.append(Turn(start, stop, len(self), call, result))

    def finish(
        self,
        question: Question,
        index: int,
        stop_reason: StopReason,
        answer: str | None,
        grade: Grade,
        policy_version: int,
    ) -> Rollout:
        """Freeze the record.

        Args:
            question: the question that was asked.
            index: position of the rollout in its group.
            stop_reason: why the rollout ended.
            answer: text of the final answer, None if there was none.
            grade: what the reward says of it.
            policy_version: version of the weights that sampled the actions.
        """
        return Rollout(
            question=question,
            index=index,
            token_ids=torch.tensor(self.token_ids, dtype=torch.int64),
            kinds=torch.tensor(self.kinds, dtype=torch.uint8),
            logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            prompt_length=self.prompt_length,
            turns=tuple(self.turns),
            stop_reason=stop_reason,
            answer=answer,
            reward=grade.reward,
            is_correct=grade.is_correct,
            policy_version=policy_version,
            experts=self._padded_experts(),
            opening=self.opening,
        )

    def _padded_experts(self) -> Tensor | None:
        if self.experts is None:
            return None
        whole = self.experts.new_full((len(self), *self.experts.shape[1:]), -1)
        whole[: len(self.experts)] = self.experts
        return whole


def prompt_record(prompt: Sequence[int], opening: str = "") -> TokenRecord:
    """Return the record of a rollout that has only its prompt.

    Args:
        prompt: token ids of the prompt.
        opening: what the tools said in it after the question.
    """
    record = TokenRecord()
    record.opening = opening
    record.append(prompt, TokenKind.PROMPT)
    return record
