import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trace_pl.credit.values import (
    LinearGapValue,
    LogRatioValue,
    RawLogprobValue,
    checked_mean_logprobs,
    linear_gap_values,
    log_ratio_values,
    raw_logprob_values,
)
from trace_pl.errors import ConfigError, CreditError

WORKED = torch.tensor([-4.0, -3.0, -3.2, -0.5, -0.4], dtype=torch.float64)
logprob_lists = st.lists(st.floats(-40.0, 0.0), min_size=1, max_size=30)
transforms = pytest.mark.parametrize(
    "transform", [log_ratio_values, raw_logprob_values, linear_gap_values]
)


def test_log_ratio_values_of_the_worked_example():
    """Gaps 4.1, 3.1, 3.3, 0.6, 0.5, so the values are log(4.1 / gap)."""
    expected = torch.tensor([0.0, 0.279585, 0.217065, 1.921813, 2.104134], dtype=torch.float64)
    torch.testing.assert_close(log_ratio_values(WORKED), expected, atol=1e-6, rtol=0.0)


def test_log_ratio_values_of_one_decisive_turn():
    values = log_ratio_values(torch.tensor([-6.0, -1.0], dtype=torch.float64))
    assert values[1].item() == pytest.approx(1.712979, abs=1e-6)


def test_raw_logprob_values_are_gains_over_the_prompt():
    expected = torch.tensor([0.0, 1.0, 0.8, 3.5, 3.6], dtype=torch.float64)
    torch.testing.assert_close(raw_logprob_values(WORKED), expected, atol=1e-12, rtol=0.0)


def test_linear_gap_values_are_shares_of_the_first_gap():
    """1 / 4.1, 0.8 / 4.1, 3.5 / 4.1 and 3.6 / 4.1."""
    expected = torch.tensor([0.0, 0.243902, 0.195122, 0.853659, 0.878049], dtype=torch.float64)
    torch.testing.assert_close(linear_gap_values(WORKED), expected, atol=1e-6, rtol=0.0)


def test_epsilon_is_part_of_the_value():
    """log((1 + 0.5) / (0 + 0.5)) = log 3."""
    values = LogRatioValue(epsilon=0.5)(torch.tensor([-1.0, 0.0], dtype=torch.float64))
    assert values[1].item() == pytest.approx(1.098612, abs=1e-6)


@given(logprob_lists, st.floats(0.01, 2.0))
def test_values_equal_their_formula_on_random_input(logprobs, epsilon):
    inputs = torch.tensor(logprobs, dtype=torch.float64)
    gaps = [-logprob + epsilon for logprob in logprobs]
    expected = {
        log_ratio_values: [math.log(gaps[0] / gap) for gap in gaps],
        linear_gap_values: [(gaps[0] - gap) / gaps[0] for gap in gaps],
    }
    for transform, numbers in expected.items():
        wanted = torch.tensor(numbers, dtype=torch.float64)
        torch.testing.assert_close(transform(inputs, epsilon), wanted, atol=1e-6, rtol=1e-6)


@transforms
@given(logprobs=logprob_lists)
def test_first_value_is_exactly_zero_in_float32(transform, logprobs):
    assert transform(torch.tensor(logprobs, dtype=torch.float32))[0].item() == 0.0


@transforms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_of_the_input_is_kept(transform, dtype):
    values = transform(WORKED.to(dtype))
    assert values.dtype == dtype
    torch.testing.assert_close(values.double(), transform(WORKED), atol=1e-6, rtol=1e-6)


@transforms
def test_more_certain_is_worth_more(transform):
    values = transform(torch.linspace(-9.0, 0.0, 50, dtype=torch.float64))
    assert (values.diff() > 0).all()


@transforms
def test_values_carry_no_gradient(transform):
    assert not transform(WORKED.clone().requires_grad_()).requires_grad


def test_rounding_above_zero_counts_as_certain():
    values = log_ratio_values(torch.tensor([-1.0, 5e-7], dtype=torch.float64))
    assert values[1].item() == pytest.approx(math.log(11.0), abs=1e-12)


@transforms
@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf"), 1e-3])
def test_a_number_that_is_no_logprob_is_refused_with_its_boundary(transform, bad):
    with pytest.raises(CreditError, match="boundary 1"):
        transform(torch.tensor([-1.0, bad, -2.0]))


def test_refusal_names_the_rollout():
    with pytest.raises(CreditError, match="boundary 0 of rollout q7/3"):
        checked_mean_logprobs(torch.tensor([float("nan")]), owner="rollout q7/3")


@pytest.mark.parametrize("shape", [(0,), (2, 2), ()])
def test_anything_but_one_number_per_boundary_is_refused(shape):
    with pytest.raises(CreditError, match="one mean log-prob for each boundary"):
        log_ratio_values(torch.zeros(shape))


@pytest.mark.parametrize("epsilon", [0.0, -0.1, float("nan"), float("inf")])
@pytest.mark.parametrize("setting", [LogRatioValue, LinearGapValue])
def test_epsilon_must_be_a_positive_number(setting, epsilon):
    with pytest.raises(ConfigError, match="epsilon above 0"):
        setting(epsilon=epsilon)


@pytest.mark.parametrize(
    ("setting", "function"),
    [
        (LogRatioValue(0.3), lambda logprobs: log_ratio_values(logprobs, 0.3)),
        (RawLogprobValue(), raw_logprob_values),
        (LinearGapValue(0.3), lambda logprobs: linear_gap_values(logprobs, 0.3)),
    ],
)
def test_settings_call_their_functions(setting, function):
    torch.testing.assert_close(setting(WORKED), function(WORKED), atol=0.0, rtol=0.0)
