from collections import Counter
from itertools import chain

import pytest
from builders import group
from hypothesis import given
from hypothesis import strategies as st

from trace_pl.training.row_plan import BatchPlan, RowPlan, RowSize, row_sizes


def sizes(lengths, version=0):
    return [
        RowSize(i // 4, i % 4, f"q{i // 4}/{i % 4}", n, n // 2, version)
        for i, n in enumerate(lengths)
    ]


def ids(forwards):
    return list(chain.from_iterable(forwards))


@given(
    st.lists(st.integers(2, 100), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 2),
)
def test_ranks_read_every_row_once_in_each_pass_and_make_equally_many_forwards(
    lengths, num_ranks, num_steps, num_passes
):
    plan = BatchPlan(num_steps, num_passes, tokens_per_forward=120)
    rows = RowPlan.of(sizes(lengths), plan, 3, num_ranks)
    assert len(rows.steps) == num_steps * num_passes
    assert {len(step) for step in rows.steps} == {rows.micro_batches * num_ranks}
    read = Counter(
        id_
        for step in range(len(rows.steps))
        for rank in range(num_ranks)
        for id_ in ids(rows.forwards(step, rank))
    )
    assert read == dict.fromkeys((row.id for row in sizes(lengths)), num_passes)
    assert set().union(*map(rows.rows_of, range(num_ranks))) == read.keys()


@given(st.lists(st.integers(2, 100), min_size=1, max_size=40), st.integers(2, 5))
def test_steps_have_the_rows_of_a_single_rank_and_totals_that_add_up_to_its_own(lengths, num_ranks):
    plan = BatchPlan(num_steps=2, tokens_per_forward=120)
    one, many = (RowPlan.of(sizes(lengths), plan, 1, ranks) for ranks in (1, num_ranks))
    for a, b in zip(one.steps, many.steps, strict=True):
        assert sorted(ids(a)) == sorted(ids(b))
    for (tokens, count), (mean_tokens, mean_count) in zip(one.totals, many.totals, strict=True):
        assert mean_tokens * num_ranks == pytest.approx(tokens)
        assert mean_count * num_ranks == pytest.approx(count)


def test_the_plan_does_not_depend_on_who_sampled_what():
    rows = sizes(range(10, 40))
    assert RowPlan.of(rows, BatchPlan(), 0, 3) == RowPlan.of(rows[::-1], BatchPlan(), 0, 3)


def test_every_rank_has_about_as_many_tokens_and_none_an_empty_forward():
    lengths = [800, 100, 90, 80, 70, 60, 400, 30, 20, 10, 50, 300]
    by_id = {row.id: row.num_tokens for row in sizes(lengths)}
    plan = RowPlan.of(sizes(lengths), BatchPlan(tokens_per_forward=550), 0, 2)
    loads = [
        [sum(by_id[id_] for id_ in forward) for forward in plan.forwards(0, rank)]
        for rank in range(2)
    ]
    assert plan.micro_batches == 2
    assert loads == [[800, 400], [410, 400]]  # forwards of one moment are alike
    assert plan.totals == ((1005 / 2, 6.0),)


def test_more_ranks_than_rows_leave_a_forward_empty():
    rows = row_sizes({0: group([0, 1])})
    plan = RowPlan.of(rows, BatchPlan(tokens_per_forward=20), 0, 3)
    assert [len(plan.forwards(0, rank)) for rank in range(3)] == [1, 1, 1]
    assert plan.forwards(0, 2) == ((),)
    assert plan.totals == ((sum(row.num_loss_tokens for row in rows) / 3, 2 / 3),)
