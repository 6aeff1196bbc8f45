import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trace_pl.credit.outcomes import (
    CentredOutcome,
    LeaveOneOutOutcome,
    StandardisedOutcome,
    centred_rewards,
    leave_one_out_advantages,
)
from trace_pl.errors import CreditError

EVERY = pytest.mark.parametrize(
    "baseline", [StandardisedOutcome(), CentredOutcome(), LeaveOneOutOutcome()], ids=repr
)
reward_lists = st.lists(st.floats(-5.0, 5.0), min_size=1, max_size=16).filter(
    lambda rewards: max(rewards) - min(rewards) > 1e-3
)


def test_one_success_in_four():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert centred_rewards(rewards).tolist() == [0.75, -0.25, -0.25, -0.25]
    third = pytest.approx(-1 / 3)
    assert leave_one_out_advantages(rewards).tolist() == [pytest.approx(1.0), third, third, third]


@given(reward_lists)
def test_formulas_on_random_input(rewards):
    inputs = torch.tensor(rewards, dtype=torch.float64)
    mean = statistics.fmean(rewards)
    others = [
        reward - statistics.fmean(rewards[:i] + rewards[i + 1 :])
        for i, reward in enumerate(rewards)
    ]
    tolerance = {"atol": 1e-9, "rtol": 1e-9}
    wanted = torch.tensor([reward - mean for reward in rewards], dtype=torch.float64)
    torch.testing.assert_close(centred_rewards(inputs), wanted, **tolerance)
    wanted = torch.tensor(others, dtype=torch.float64)
    torch.testing.assert_close(leave_one_out_advantages(inputs), wanted, **tolerance)


@EVERY
@pytest.mark.parametrize("rewards", [[], [1.0], [0.3, 0.3 + 1e-7, 0.3]])
def test_equal_rewards_and_single_rollouts_give_exactly_zero(baseline, rewards):
    assert baseline(torch.tensor(rewards)).tolist() == [0.0] * len(rewards)


@EVERY
def test_permuting_a_group_permutes_its_advantages(baseline):
    rewards = torch.tensor([1.0, 0.0, 0.25, 0.0, 1.0], dtype=torch.float64)
    order = torch.tensor([3, 1, 4, 0, 2])
    torch.testing.assert_close(baseline(rewards[order]), baseline(rewards)[order])


@EVERY
def test_a_non_finite_reward_is_refused(baseline):
    with pytest.raises(CreditError, match="finite reward"):
        baseline(torch.tensor([0.0, float("nan")]))
