"""Numbers that say how an agent behaved, from finished rollouts, and how they are logged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from lightning import LightningModule

from trace_pl.types import Rollout, RolloutGroup, StopReason


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return means over rollouts: success, turns, tokens, how they ended, what they found.

    ``evidence_recall`` is the share of the question's known evidence pages that some tool result
    showed in full by ``open``; it is NaN where no question names its evidence.
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
    found["evidence_recall"] = fmean(recalls) if recalls else math.nan
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
    evidence = set(rollout.question.evidence)
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


def log_means(module: LightningModule, metrics: Mapping[str, float], weight: int = 1) -> None:
    """Log the mean over all ranks of each metric, once for an epoch.

    One reduction for all of them. Lightning's own divides by a rounded mean of the weights, which
    is wrong where ranks hold different numbers of items.

    Args:
        module: Logs them.
        metrics: Values by tag, the same tags on every rank; NaN where a value is not defined. A tag
            that is not defined on any rank is not logged.
        weight: How many items the values of this rank are means of.
    """
    values = torch.tensor(list(metrics.values()))
    weights = weight * (~values.isnan()).float()
    sums = torch.stack([values.nan_to_num() * weights, weights])
    if module.trainer.world_size > 1:
        sums = module.trainer.strategy.reduce(sums.to(module.device), reduce_op="sum")
    for name, total, count in zip(metrics, *sums.tolist(), strict=True):
        if count > 0.0:
            module.log(name, total / count, on_step=False, on_epoch=True, batch_size=1)
