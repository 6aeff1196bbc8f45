"""Metrics of any division of the items among ranks and updates are those of all items together."""

import math

import pytest
import torch
from builders import group
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MeanMetric

from trace_pl.credit.pipeline import CreditReport
from trace_pl.training.credit_metrics import experience_metrics
from trace_pl.training.metrics import EpochMetrics
from trace_pl.types import ProbeValues, TokenAdvantages

NUMBERS = st.floats(-1e3, 1e3, width=32)
PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=6)
RANKS = st.lists(st.lists(PAIRS, max_size=3), min_size=1, max_size=4)
"""Pairs of each update of each rank."""


def together(ranks):
    """Return what every rank computes, once they have exchanged their states."""
    vectors = torch.stack([metrics.states() for metrics in ranks])
    found = [metrics.compute(lambda states: vectors) for metrics in ranks]
    assert all(each == found[0] for each in found)
    return found[0]


@settings(deadline=None, max_examples=60)
@given(RANKS)
def test_ragged_ranks_give_the_metrics_of_the_union(ranks):
    collected = []
    for updates in ranks:
        metrics = EpochMetrics()
        metrics.total("number", sum(map(len, updates)))
        for pairs in [[], *updates]:
            x, y = torch.tensor(pairs).reshape(-1, 2).unbind(dim=1)
            metrics.average({"x": x})
            metrics.correlate("xy", x, y)
            metrics.largest("most", x)
            metrics.smallest("least", x)
        collected.append(metrics)
    found = together(collected)
    union = torch.tensor([pair for updates in ranks for pairs in updates for pair in pairs])
    x, y = union.double().reshape(-1, 2).unbind(dim=1)
    assert found["number"] == len(x)
    if not len(x):
        assert found.keys() == {"number"}
        return
    assert found["x"] == pytest.approx(float(x.mean()), rel=1e-9, abs=1e-9)
    assert (found["most"], found["least"]) == (float(x.max()), float(x.min()))
    if len(x) > 2 and min(float(x.std()), float(y.std())) > 1.0:
        expected = float(torch.corrcoef(torch.stack([x, y]))[0, 1])
        assert found["xy"] == pytest.approx(expected, abs=1e-7)
    elif float(x.std(correction=0)) == 0.0 or float(y.std(correction=0)) == 0.0:
        assert "xy" not in found


def test_a_loss_that_is_no_number_is_shown_and_what_has_no_items_is_not():
    metrics = EpochMetrics()
    metrics.average({"loss": torch.tensor([1.0, math.nan]), "nothing": torch.tensor([])})
    found = metrics.compute()
    assert found.keys() == {"loss"}
    assert math.isnan(found["loss"])


def test_thousands_of_updates_lose_no_digits():
    metrics = EpochMetrics()
    for _ in range(2_000):
        metrics.average({"x": torch.tensor(0.1, dtype=torch.float64)})
    metrics.average({"x": torch.tensor(1e8, dtype=torch.float64)})
    assert metrics.compute()["x"] == pytest.approx((2e2 + 1e8) / 2_001, rel=1e-12)


class Conversions(TorchDispatchMode):
    """Counts what is moved to main memory or cast, which both are this operation."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function is torch.ops.aten._to_copy.default
        return function(*args, **(kwargs or {}))


def test_the_items_of_an_update_are_moved_together():
    metrics = EpochMetrics()
    items = {f"loss/{name}": torch.tensor(float(number)) for number, name in enumerate("abcdefgh")}
    items["loss/finite"] = torch.tensor([True, False])
    metrics.average(items)  # makes the metrics
    with Conversions() as conversions:
        metrics.average(items)
    assert conversions.number == 1
    found = metrics.compute()
    assert found["loss/h"] == 7.0
    assert found["loss/finite"] == 0.5


def test_half_precision_would_reach_the_states_of_a_metric_inside_a_module():
    # Why metrics stay outside of the module tree; torchmetrics guards ``half`` alone.
    holder = torch.nn.ModuleDict({"metric": MeanMetric()})
    holder.half()
    assert holder["metric"].weight.dtype == torch.float32
    holder.to(torch.bfloat16)
    assert holder["metric"].weight.dtype == torch.bfloat16


def report(groups, has_values=True):
    """Return credit that differs from rollout to rollout."""
    rollouts = [rollout for each in groups for rollout in each.rollouts]
    values, advantages = [], []
    for r in rollouts:
        generator = torch.Generator().manual_seed(r.index + 100 * len(r.token_ids))
        numbers = torch.randn(2, r.num_turns + 1, generator=generator)
        values.append(ProbeValues(r.id, *numbers))
        advantages.append(TokenAdvantages(r.id, r.loss_mask * 0.5, r.reward - 0.5, numbers[0, 1:]))
    return CreditReport([], values if has_values else [], [], advantages)


def experience(groups, has_values=True):
    return experience_metrics(groups, report(groups, has_values))


def test_a_rank_that_lost_all_rollouts_takes_part():
    groups = (group([0, 1, 0], 0), group([1, 1], 1), group([0, 0, 0, 1], 2))
    alone = experience(groups).compute()
    assert alone["rollout/count"] == 9
    assert alone["rollout/success"] == pytest.approx(4 / 9)
    assert alone["rollout/zero_variance_groups"] == pytest.approx(1 / 3)
    assert -1.0 < alone["credit/value_outcome_correlation"] < 1.0
    shared = together([experience(groups[:1]), experience(()), experience(groups[1:])])
    assert shared == pytest.approx(alone, abs=1e-9)


def test_outcome_only_runs_have_no_tags_of_values():
    found = experience((group([0, 1]),), has_values=False).compute()
    assert "credit/outcome_abs" in found
    assert not [tag for tag in found if "value" in tag or "readiness" in tag]


def test_what_is_not_known_is_no_tag():
    found = experience((group([0, 1]),)).compute()
    assert "rollout/evidence_recall" not in found  # no question names its evidence
    assert found["rollout/tool_errors"] == 0.0
