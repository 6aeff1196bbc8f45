"""Credit compared among the rollouts of a question, by hand."""

import pytest
import torch
from builders import question, rollout

from callbacks import A2TGPOAnchor, AnswerLikelihood, IGPOAnchor, ReadinessBaseline, TurnwiseAnchor
from trace_pl.credit.boundaries import tool_call_boundaries
from trace_pl.credit.groups import pooled_advantages, readiness_advantages, turnwise_advantages
from trace_pl.errors import ConfigError
from trace_pl.types import ProbeValues, RolloutGroup, TurnCredit

CLOSE = {"atol": 1e-5, "rtol": 0.0}


def tensors(*rows):
    return [torch.tensor(row, dtype=torch.float32) for row in rows]


def assert_rows(found, *expected):
    for one, row in zip(found, expected, strict=True):
        torch.testing.assert_close(one, torch.tensor(row, dtype=torch.float32), **CLOSE)


def test_credit_is_compared_with_that_of_others_from_the_same_readiness():
    values = tensors([0.0, 0.5, 0.5], [0.0, 1.0], [0.0])
    credits = tensors([0.5, 0.0], [1.0], [])
    found = readiness_advantages(values, credits, width=0.2)
    # From 0 the first gained 0.5, the second 1, and the third answered at once and gained nothing;
    # nobody else was ever at 0.5, nor at 1.
    assert_rows(found, [0.5 - 0.5, 0.0, 0.0], [1.0 - 0.25, 0.0], [0.0 - 0.75])


def test_a_group_that_agrees_trains_exactly_nothing():
    # 0.1 is no binary fraction, so a mean of three of them need not be 0.1.
    values, credits = tensors(*[[0.0, 0.1, 0.7]] * 4), tensors(*[[0.7, 0.6]] * 4)
    for row in readiness_advantages(values, credits):
        assert not row.any()


def test_each_rollout_has_one_vote_that_of_its_nearest_readiness():
    # The second dwells at 0 for two turns and is at 0.15 later; from 0.1 that one is nearest.
    values = tensors([0.0, 0.1], [0.0, 0.0, 0.15, 1.0])
    credits = tensors([0.1], [1.0, 1.0, 0.85])
    first, second = readiness_advantages(values, credits, width=0.2)
    assert_rows([first], [0.1 - 1.0, 0.0 - 0.85])
    assert_rows([second], [0.9, 0.9, 0.85, 0.0])


def test_beyond_the_width_nobody_is_as_ready():
    values, credits = tensors([0.0, 0.3], [0.0, 0.7]), tensors([0.3], [0.7])
    assert_rows(readiness_advantages(values, credits, 0.2), [-0.4, 0.0], [0.4, 0.0])
    assert_rows(readiness_advantages(values, credits, 0.31), [-0.4, -0.7], [0.4, 0.0])


def test_gains_and_outcomes_are_standardised_together_and_summed():
    gains, rewards = tensors([0.5], [0.0, 0.5]), torch.tensor([1.0, 0.0])
    # Of 0.5, 1, 0, 0.5 and 0 the mean is 0.4 and the deviation 0.374166.
    found = pooled_advantages(gains, rewards)
    assert_rows(found, [1.870829, 1.603567], [-1.870829, -0.801784, -1.069045])
    found = pooled_advantages(gains, rewards, discount=0.5)
    assert_rows(found, [1.069045, 1.603567], [-1.202676, -0.267261, -1.069045])


def test_turns_of_the_same_number_are_compared():
    found = turnwise_advantages(tensors([1.0, 5.0], [3.0], [2.0, 1.0]))
    assert_rows(found, [-1.224745, 1.0], [1.224745], [0.0, -1.0])


@pytest.fixture
def asked():
    """Two rollouts of one turn each, one right, with what a prober and a backup said of them."""
    both = RolloutGroup(question(), (rollout(0, reward=1.0), rollout(1, reward=0.0)))
    boundaries = [tool_call_boundaries(item) for item in both.rollouts]
    levels = tensors([0.0, 0.5], [0.0, 0.1])
    values = [
        ProbeValues(r.id, -torch.ones(2), level)
        for r, level in zip(both.rollouts, levels, strict=True)
    ]
    credits = [TurnCredit(v.rollout_id, v.values.diff()) for v in values]
    return both, boundaries, values, credits


def by_span(results, asked):
    """Return the advantage of the turn's tokens and that of the answer's, for each rollout."""
    found = []
    for item, result in zip(asked[0].rollouts, results, strict=True):
        sampled = result.advantages[item.loss_mask]
        found.append([round(float(sampled[0]), 4), round(float(sampled[-1]), 4)])
    return found


@pytest.mark.parametrize(
    ("anchor", "expected"),
    [
        # Outcome 1 and -1. From 0 the turns gained 0.5 and 0.1; the second answered at 0.1, from
        # where (0 is near enough) the first gained 0.5; nobody else came to 0.5.
        (ReadinessBaseline(turn_weight=0.5), [[1.2, 1.0], [-1.2, -1.25]]),
        # 0.5, 1, 0.1, 0: mean 0.4, deviation 0.394; a turn gets its own and the answer's.
        (IGPOAnchor(), [[1.778, 1.524], [-1.778, -1.016]]),
        (TurnwiseAnchor(turn_weight=0.5), [[1.5, 1.0], [-1.5, -1.0]]),
        (A2TGPOAnchor(turn_weight=0.5), [[1.5, 1.0], [-1.5, -1.0]]),
        (AnswerLikelihood(), [[1.0, 1.0], [-1.0, -1.0]]),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list) else "",
)
def test_anchors_write_the_advantage_of_turns_and_answers(asked, anchor, expected):
    assert by_span(anchor.anchor(*asked), asked) == expected


def test_later_turns_count_at_the_scale_of_one():
    anchor = A2TGPOAnchor(discount=1.0)
    assert_rows([anchor.accumulate(torch.tensor([-1.224745, 1.0]))], [-0.158919, 1.0])


@pytest.mark.parametrize(
    ("anchor", "setting"),
    [
        (ReadinessBaseline, {"width": -0.1}),
        (ReadinessBaseline, {"turn_weight": float("nan")}),
        (IGPOAnchor, {"discount": 1.5}),
        (A2TGPOAnchor, {"discount": -0.5}),
        (TurnwiseAnchor, {"outcome_weight": -1.0}),
        (AnswerLikelihood, {"outcome_weight": float("inf")}),
    ],
)
def test_settings_out_of_range_are_refused(anchor, setting):
    with pytest.raises(ConfigError, match="Expected"):
        anchor(**setting)
