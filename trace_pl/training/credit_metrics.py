"""What an epoch's experience was worth: the metrics of its rollouts and of their credit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from trace_pl.credit.pipeline import CreditReport
from trace_pl.training.metrics import EpochMetrics
from trace_pl.training.rollout_metrics import group_statistics, rollout_statistics
from trace_pl.types import Rollout, RolloutGroup


def experience_metrics(groups: Sequence[RolloutGroup], report: CreditReport) -> EpochMetrics:
    """Return ``rollout/*`` and ``credit/*`` of one epoch.

    ``value_outcome_correlation`` is the correlation of a rollout's last value with its reward.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics = EpochMetrics()
    for statistics in (rollout_statistics(rollouts), group_statistics(groups)):
        metrics.average({f"rollout/{name}": values for name, values in statistics.items()})
    metrics.total("rollout/count", len(rollouts))
    statistics = credit_statistics(rollouts, report)
    metrics.average({f"credit/{name}": values for name, values in statistics.items()})
    credit = _laid_end_to_end(c.credit for c in report.credits if report.values)
    metrics.largest("credit/turn_credit_max", credit)
    metrics.smallest("credit/turn_credit_min", credit)
    rewards = torch.tensor([r.reward for r in rollouts] if report.values else [])
    metrics.correlate("credit/value_outcome_correlation", statistics["value_last"], rewards)
    return metrics


def credit_statistics(rollouts: Sequence[Rollout], report: CreditReport) -> dict[str, Tensor]:
    """Return what is averaged of credit: how large it is and where it comes from.

    The items of a mean are sampled tokens (``advantage_abs``, ``trained_tokens``), turns
    (``turn_reward_abs``) or rollouts. Where the anchor needs no turn credit, ``value_last`` and
    readiness have no items.
    """
    sampled = _laid_end_to_end(
        a.advantages[r.loss_mask] for r, a in zip(rollouts, report.advantages, strict=True)
    )
    return {
        "advantage_abs": sampled.abs(),
        "trained_tokens": sampled != 0,
        "outcome_abs": torch.tensor([abs(a.outcome_advantage) for a in report.advantages]),
        "turn_reward_abs": _laid_end_to_end(a.turn_rewards for a in report.advantages).abs(),
        # Groups that are all right or all wrong, as far as turn credit trains them at all.
        "equal_groups_trained": torch.tensor(
            [a.outcome_advantage == 0.0 and bool(a.advantages.any()) for a in report.advantages]
        ),
        "value_last": torch.tensor([float(v.values[-1]) for v in report.values]),
        "readiness_start": torch.tensor([float(v.mean_logprobs[0]) for v in report.values]),
        "readiness_end": torch.tensor([float(v.mean_logprobs[-1]) for v in report.values]),
    }


def _laid_end_to_end(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0), *parts])
