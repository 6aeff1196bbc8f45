import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_pl.models.packing import balanced_bins, bins_within

costs = st.lists(st.integers(1, 50), max_size=40)


@given(costs, st.integers(1, 9))
def test_every_item_is_in_one_bin_and_bins_differ_by_one_item_at_most(sizes, count):
    bins = balanced_bins(sizes, count)
    assert len(bins) == count
    assert sorted(index for b in bins for index in b) == list(range(len(sizes)))
    fill = [sum(sizes[index] for index in b) for b in bins]
    assert max(fill) - min(fill) <= max(sizes, default=0)


@given(costs, st.integers(1, 120))
def test_a_bin_keeps_the_budget_unless_its_only_item_is_larger(sizes, budget):
    bins = bins_within(sizes, budget)
    assert sorted(index for b in bins for index in b) == list(range(len(sizes)))
    assert all(len(b) == 1 or 0 < sum(sizes[index] for index in b) <= budget for b in bins)


@pytest.mark.parametrize(
    ("sizes", "budget", "expected"), [([3, 9, 4, 10], 20, 2), ([5, 5], 10, 1), ([], 10, 0)]
)
def test_no_more_bins_than_needed(sizes, budget, expected):
    assert len(bins_within(sizes, budget)) == expected
