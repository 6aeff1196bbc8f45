import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trace_pl.credit.td import k_step_backup
from trace_pl.credit.values import log_ratio_values
from trace_pl.errors import ConfigError, CreditError

value_lists = st.lists(st.floats(-10.0, 10.0), min_size=1, max_size=25)
steps = st.integers(1, 30)
discounts = st.floats(0.0, 1.0)


def backup_by_hand(values, num_steps, discount):
    """The formula, one turn and one step at a time."""
    num_turns = len(values) - 1
    credit = []
    for turn in range(num_turns):
        last = min(turn + num_steps - 1, num_turns - 1)
        total = weight_sum = 0.0
        for step in range(turn, last + 1):
            weight = discount ** (step - turn)
            total += weight * (values[step + 1] - values[step])
            weight_sum += weight
        credit.append(total / weight_sum)
    return torch.tensor(credit, dtype=torch.float64)


def test_backup_of_the_worked_example():
    """Gains 0.279585, -0.062520, 1.704748, 0.182322 with weights 1, 0.8, 0.64."""
    logprobs = torch.tensor([-4.0, -3.0, -3.2, -0.5, -0.4], dtype=torch.float64)
    expected = torch.tensor([0.541233, 0.581133, 1.028114, 0.182322], dtype=torch.float64)
    credit = k_step_backup(log_ratio_values(logprobs), num_steps=3, discount=0.8)
    torch.testing.assert_close(credit, expected, atol=1e-5, rtol=0.0)


def test_backup_of_one_turn_is_its_value():
    credit = k_step_backup(torch.tensor([0.0, 1.712979], dtype=torch.float64))
    assert credit.tolist() == pytest.approx([1.712979], abs=1e-12)


@given(value_lists, steps, discounts)
def test_backup_equals_the_formula_on_random_input(values, num_steps, discount):
    credit = k_step_backup(torch.tensor(values, dtype=torch.float64), num_steps, discount)
    torch.testing.assert_close(
        credit, backup_by_hand(values, num_steps, discount), atol=1e-6, rtol=1e-6
    )


@given(value_lists, discounts)
def test_one_step_backup_is_the_difference_of_values(values, discount):
    inputs = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(
        k_step_backup(inputs, 1, discount), inputs.diff(), atol=1e-12, rtol=0.0
    )


@given(value_lists)
def test_one_step_credit_telescopes_to_the_last_value(values):
    inputs = torch.tensor(values, dtype=torch.float64)
    assert k_step_backup(inputs, num_steps=1).sum().item() == pytest.approx(
        values[-1] - values[0], abs=1e-9
    )


@given(value_lists, st.integers(0, 40))
def test_backup_beyond_last_turn_equals_monte_carlo(values, beyond):
    inputs = torch.tensor(values, dtype=torch.float64)
    num_turns = len(values) - 1
    at_end = k_step_backup(inputs, max(1, num_turns))
    torch.testing.assert_close(
        k_step_backup(inputs, max(1, num_turns + beyond)), at_end, atol=0.0, rtol=0.0
    )


def test_undiscounted_monte_carlo_is_the_mean_of_all_later_gains():
    """Gains 1, 2, 6: means of the tails are 3, 4 and 6."""
    credit = k_step_backup(torch.tensor([0.0, 1.0, 3.0, 9.0]), num_steps=99, discount=1.0)
    torch.testing.assert_close(credit, torch.tensor([3.0, 4.0, 6.0]), atol=1e-6, rtol=0.0)


@given(st.floats(-10.0, 10.0), st.integers(1, 20), steps, discounts)
def test_constant_values_give_no_credit(value, num_boundaries, num_steps, discount):
    credit = k_step_backup(torch.full((num_boundaries,), value), num_steps, discount)
    torch.testing.assert_close(credit, torch.zeros(num_boundaries - 1), atol=0.0, rtol=0.0)


@given(st.floats(-5.0, 5.0), st.integers(1, 20), steps, discounts)
def test_equal_gains_are_their_own_credit_at_every_turn(gain, num_turns, num_steps, discount):
    values = gain * torch.arange(num_turns + 1, dtype=torch.float64)
    expected = torch.full((num_turns,), gain, dtype=torch.float64)
    torch.testing.assert_close(
        k_step_backup(values, num_steps, discount), expected, atol=1e-9, rtol=0.0
    )


@given(st.lists(st.floats(-10.0, 10.0), min_size=2, max_size=15), st.data())
def test_a_redundant_turn_leaves_the_sum_of_one_step_credit_unchanged(values, data):
    """A turn that changes nothing repeats a value."""
    place = data.draw(st.integers(0, len(values) - 1))
    padded = [*values[: place + 1], values[place], *values[place + 1 :]]
    before = k_step_backup(torch.tensor(values, dtype=torch.float64), num_steps=1)
    after = k_step_backup(torch.tensor(padded, dtype=torch.float64), num_steps=1)
    assert after.sum().item() == pytest.approx(before.sum().item(), abs=1e-9)
    assert after[place].item() == 0.0


def test_no_turn_gives_no_credit():
    credit = k_step_backup(torch.tensor([0.0]))
    torch.testing.assert_close(credit, torch.empty(0), atol=0.0, rtol=0.0)


def test_backup_keeps_float32_and_its_numbers():
    values = torch.tensor([0.0, 0.279585, 0.217065, 1.921813, 2.104134])
    expected = torch.tensor([0.541233, 0.581133, 1.028114, 0.182322])
    torch.testing.assert_close(k_step_backup(values), expected, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_are_refused(bad):
    with pytest.raises(CreditError, match="finite boundary values"):
        k_step_backup(torch.tensor([0.0, bad]))


@pytest.mark.parametrize("shape", [(0,), (2, 3)])
def test_anything_but_one_value_per_boundary_is_refused(shape):
    with pytest.raises(CreditError, match="one value for each boundary"):
        k_step_backup(torch.zeros(shape))


@pytest.mark.parametrize(
    ("num_steps", "discount", "what"),
    [(0, 0.8, "num_steps"), (-1, 0.8, "num_steps"), (3, 1.5, "discount"), (3, -0.1, "discount")],
)
def test_settings_out_of_range_are_refused(num_steps, discount, what):
    with pytest.raises(ConfigError, match=what):
        k_step_backup(torch.zeros(3), num_steps, discount)
