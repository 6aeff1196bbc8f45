"""How an agent behaved: statistics of finished rollouts, whose means are logged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trace_pl.credit.anchoring import EQUAL_REWARDS
from trace_pl.types import TOOL_ERRORS, Rollout, RolloutGroup, StopReason


def rollout_statistics(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """Return what is averaged: success, turns, tokens, how rollouts ended, what they found.

    Most have one item for each rollout, ``tool_errors`` one for each turn. ``evidence_recall`` has
    one for each rollout of a question that names its evidence.
    """
    errors = [turn.result.error for r in rollouts for turn in r.turns]
    recalls = [recall for r in rollouts if (recall := evidence_recall(r)) is not None]
    items = {
        "success": [r.is_correct for r in rollouts],
        "reward": [r.reward for r in rollouts],
        "tool_turns": [r.num_turns for r in rollouts],
        "tokens": [len(r.token_ids) for r in rollouts],
        "answer_rate": [r.answer is not None for r in rollouts],
        "tool_errors": [error is not None for error in errors],
        "repeated_calls": [_repeats(r) for r in rollouts],
        "evidence_recall": recalls,
    }
    for kind in TOOL_ERRORS:
        items[f"tool_errors/{kind}"] = [error == kind for error in errors]
    for reason in StopReason:
        items[f"stop/{reason.value}"] = [r.stop_reason is reason for r in rollouts]
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in items.items()}


def group_statistics(groups: Sequence[RolloutGroup]) -> dict[str, Tensor]:
    """Return which groups carry no outcome signal, one item for each group."""
    flat = [float(g.rewards.max() - g.rewards.min()) <= EQUAL_REWARDS for g in groups]
    return {"zero_variance_groups": torch.tensor(flat, dtype=torch.float64)}


def evidence_recall(rollout: Rollout) -> float | None:
    """Return the share of the question's evidence that some tool result showed in full.

    None if the question does not name its evidence.
    """
    evidence = set(rollout.question.evidence)
    if not evidence:
        return None
    opened = {docid for turn in rollout.turns for docid in turn.result.opened}
    return len(evidence & opened) / len(evidence)


def _repeats(rollout: Rollout) -> int:
    # The pages belong to it: "open 1" is another call after another search.
    calls = [(t.call.name, repr(t.call.arguments), tuple(t.result.docids)) for t in rollout.turns]
    return len(calls) - len(set(calls))
