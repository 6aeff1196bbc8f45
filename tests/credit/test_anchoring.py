import statistics

import pytest
import torch
from builders import group
from hypothesis import given
from hypothesis import strategies as st

from callbacks import TraceAnchor
from trace_pl.credit.anchoring import (
    anchored_turn_rewards,
    group_outcome_advantages,
    token_advantages,
)
from trace_pl.credit.boundaries import tool_call_boundaries
from trace_pl.credit.outcomes import CentredOutcome
from trace_pl.errors import ConfigError, CreditError
from trace_pl.types import TurnCredit

reward_lists = st.lists(st.floats(-5.0, 5.0), min_size=1, max_size=16)


def test_outcome_advantage_divides_by_the_population_deviation():
    """Mean 0.25, population std sqrt(0.1875) = 0.433013."""
    advantages = group_outcome_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    expected = torch.tensor([1.732051, -0.577350, -0.577350, -0.577350], dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
@pytest.mark.parametrize("size", [0, 1, 2, 8])
def test_equal_rewards_give_exactly_zero(reward, size):
    advantages = group_outcome_advantages(torch.full((size,), reward))
    torch.testing.assert_close(advantages, torch.zeros(size), atol=0.0, rtol=0.0)


def test_rewards_that_differ_by_rounding_give_exactly_zero():
    rewards = torch.tensor([1.0, 1.0 + 2e-7, 1.0 - 2e-7])
    torch.testing.assert_close(
        group_outcome_advantages(rewards), torch.zeros(3), atol=0.0, rtol=0.0
    )


@given(reward_lists)
def test_outcome_advantages_equal_the_formula_on_random_input(rewards):
    inputs = torch.tensor(rewards, dtype=torch.float64)
    if max(rewards) - min(rewards) <= 1e-6:
        expected = [0.0] * len(rewards)
    else:
        mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
        expected = [(reward - mean) / deviation for reward in rewards]
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(group_outcome_advantages(inputs), wanted, atol=1e-6, rtol=1e-6)


@given(reward_lists, st.randoms(use_true_random=False))
def test_permuting_a_group_permutes_its_advantages(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    inputs = torch.tensor(rewards, dtype=torch.float64)
    torch.testing.assert_close(
        group_outcome_advantages(inputs[order]),
        group_outcome_advantages(inputs)[order],
        atol=1e-9,
        rtol=1e-9,
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_reward_is_refused(bad):
    with pytest.raises(CreditError, match="finite reward"):
        group_outcome_advantages(torch.tensor([0.0, bad]))


def test_anchored_rewards_of_the_worked_example():
    """The last three turns get 2 * 0.8^3, 2 * 0.8^2 and 2 * 0.8 times A = 1."""
    credit = torch.tensor([0.541233, 0.581133, 1.028114, 0.182322], dtype=torch.float64)
    expected = torch.tensor([0.541233, 1.605133, 2.308114, 1.782322], dtype=torch.float64)
    torch.testing.assert_close(anchored_turn_rewards(credit, 1.0), expected, atol=1e-5, rtol=0.0)


def test_useless_turns_of_a_failed_rollout_are_punished_by_the_outcome_alone():
    rewards = anchored_turn_rewards(torch.zeros(2, dtype=torch.float64), -1.0)
    assert rewards.tolist() == pytest.approx([-1.28, -1.60], abs=1e-12)


def test_a_group_without_contrast_leaves_turn_credit_alone():
    credit = torch.tensor([1.712979], dtype=torch.float64)
    torch.testing.assert_close(anchored_turn_rewards(credit, 0.0), credit, atol=0.0, rtol=0.0)


@given(
    st.lists(st.floats(-5.0, 5.0), max_size=20),
    st.floats(-3.0, 3.0),
    st.integers(1, 25),
    st.floats(0.0, 1.0),
    st.floats(0.0, 4.0),
)
def test_anchored_rewards_equal_the_formula_on_random_input(
    credit, outcome, num_steps, discount, scale
):
    num_turns = len(credit)
    expected = []
    for turn, part in enumerate(credit):
        reaches_end = min(turn + num_steps - 1, num_turns - 1) == num_turns - 1
        anchor = scale * discount ** (num_turns - turn) * outcome if reaches_end else 0.0
        expected.append(part + anchor)
    got = anchored_turn_rewards(
        torch.tensor(credit, dtype=torch.float64), outcome, num_steps, discount, scale
    )
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)


def test_anchor_settings_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="num_steps"):
        anchored_turn_rewards(torch.zeros(2), 1.0, num_steps=0)


def test_every_sampled_token_gets_outcome_and_its_own_turn():
    """Prompt of 2; turn 0 is tokens 2-4, turn 1 tokens 5-7, the answer tokens 8-9."""
    mask = torch.tensor([0, 0, 1, 1, 0, 0, 1, 0, 1, 1], dtype=torch.bool)
    advantages = token_advantages(
        mask, (2, 5, 8), torch.tensor([3.0, -2.0]), 0.5, outcome_weight=1.0, turn_weight=0.2
    )
    expected = torch.tensor([0.0, 0.0, 1.1, 1.1, 0.0, 0.0, 0.1, 0.0, 0.5, 0.5])
    torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=0.0)


def test_a_rollout_without_turns_gets_the_outcome_alone():
    mask = torch.tensor([0, 1, 1], dtype=torch.bool)
    advantages = token_advantages(mask, (1,), torch.empty(0), -1.5, outcome_weight=2.0)
    torch.testing.assert_close(advantages, torch.tensor([0.0, -3.0, -3.0]), atol=0.0, rtol=0.0)


@st.composite
def ragged_rollouts(draw):
    ends = [draw(st.integers(1, 5))]
    for _ in range(draw(st.integers(0, 6))):
        ends.append(ends[-1] + draw(st.integers(1, 5)))
    length = ends[-1] + draw(st.integers(0, 5))
    mask = [False] * ends[0] + draw(
        st.lists(st.booleans(), min_size=length - ends[0], max_size=length - ends[0])
    )
    rewards = draw(st.lists(st.floats(-5, 5), min_size=len(ends) - 1, max_size=len(ends) - 1))
    return mask, ends, rewards


@given(ragged_rollouts(), st.floats(-3.0, 3.0), st.floats(0.0, 2.0), st.floats(0.0, 2.0))
def test_token_advantages_equal_the_formula_on_random_input(
    rollout, outcome, outcome_weight, turn_weight
):
    mask, ends, rewards = rollout
    expected = []
    for token, is_sampled in enumerate(mask):
        advantage = outcome_weight * outcome if is_sampled else 0.0
        for turn, reward in enumerate(rewards):
            if is_sampled and ends[turn] <= token < ends[turn + 1]:
                advantage += turn_weight * reward
        expected.append(advantage)
    got = token_advantages(
        torch.tensor(mask),
        ends,
        torch.tensor(rewards, dtype=torch.float64),
        outcome,
        outcome_weight,
        turn_weight,
    )
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)
    assert (got[~torch.tensor(mask)] == 0.0).all()


def test_mismatched_counts_of_turns_and_boundaries_are_refused():
    with pytest.raises(CreditError, match="Expected 2 turn rewards for 3 boundaries, got 1"):
        token_advantages(torch.ones(9, dtype=torch.bool), (2, 4, 6), torch.zeros(1), 0.0)


def test_a_boundary_beyond_the_rollout_is_refused():
    with pytest.raises(CreditError, match="within the 5 tokens"):
        token_advantages(torch.ones(5, dtype=torch.bool), (2, 6), torch.zeros(1), 0.0)


def test_equal_groups_train_by_turn_credit_unless_told_otherwise():
    asked = group([1.0, 1.0])
    boundaries = [tool_call_boundaries(item) for item in asked.rollouts]
    credits = [TurnCredit(item.id, torch.ones(item.num_turns)) for item in asked.rollouts]
    kept = TraceAnchor().anchor(asked, boundaries, [], credits)
    dropped = TraceAnchor(train_equal_groups=False).anchor(asked, boundaries, [], credits)
    assert all(result.advantages.any() for result in kept)
    assert not any(result.advantages.any() for result in dropped)
    mixed = group([1.0, 0.0])
    same = [
        TraceAnchor(train_equal_groups=keep).anchor(mixed, boundaries, [], credits)
        for keep in (True, False)
    ]
    for one, other in zip(*same, strict=True):
        torch.testing.assert_close(one.advantages, other.advantages, atol=0.0, rtol=0.0)


def test_trace_can_stand_on_another_outcome_baseline():
    asked = group([1.0, 0.0])
    boundaries = [tool_call_boundaries(item) for item in asked.rollouts]
    credits = [TurnCredit(item.id, torch.zeros(item.num_turns)) for item in asked.rollouts]
    results = TraceAnchor(outcome=CentredOutcome()).anchor(asked, boundaries, [], credits)
    assert [result.outcome_advantage for result in results] == [0.5, -0.5]
