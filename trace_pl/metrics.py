"""Numbers that say how an agent behaved, from finished rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from trace_pl.types import Rollout, RolloutGroup, StopReason


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return means over rollouts: success, turns, tokens, how they ended, what they found.

    ``evidence_recall`` is the share of the question's known evidence pages that some tool result
    showed in full by ``open``; it is left out where no question names its evidence.
    """
    if not rollouts:
        return {}
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    found = {
        "success": fmean(r.is_correct for r in rollouts),
        "reward": fmean(r.reward for r in rollouts),
        "tool_turns": fmean(r.num_turns for r in rollouts),
        "tokens": fmean(len(r.token_ids) for r in rollouts),
        "answer_rate": fmean(r.answer is not None for r in rollouts),
        "tool_errors": fmean(t.result.error is not None for t in turns) if turns else 0.0,
        "repeated_calls": fmean(_repeats(r) for r in rollouts),
    }
    recalls = [recall for r in rollouts if (recall := evidence_recall(r)) is not None]
    if recalls:
        found["evidence_recall"] = fmean(recalls)
    for reason in StopReason:
        found[f"stop/{reason.value}"] = fmean(r.stop_reason is reason for r in rollouts)
    return found


def group_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return how much outcome signal the groups carry."""
    if not groups:
        return {}
    flat = [float(g.rewards.max() - g.rewards.min()) < 1e-6 for g in groups]
    return {"zero_variance_groups": fmean(flat)}


def evidence_recall(rollout: Rollout) -> float | None:
    """Return the share of the question's evidence pages that were opened, None if unknown."""
    evidence = set(rollout.question.meta.get("evidence", ()))
    if not evidence:
        return None
    opened = {
        docid
        for turn in rollout.turns
        if turn.call.name.endswith("open")
        for docid in turn.result.docids
    }
    return len(evidence & opened) / len(evidence)


def _repeats(rollout: Rollout) -> int:
    # The pages belong to it: "open 1" is another call after another search.
    calls = [(t.call.name, repr(t.call.arguments), tuple(t.result.docids)) for t in rollout.turns]
    return len(calls) - len(set(calls))
