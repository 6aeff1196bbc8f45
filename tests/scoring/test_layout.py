import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trace_pl.errors import CreditError
from trace_pl.probes import Branch, ProbeRequest
from trace_pl.scoring.layout import lay_out_branches, plan_batches, require_finite_scores


def request(prefix_ends, *branches, length=20):
    return ProbeRequest("q/0", torch.arange(100, 100 + length), prefix_ends, branches)


def test_branches_carry_opening_and_all_but_the_last_answer_token():
    layout = lay_out_branches(request((3, 7), Branch((1, 2), (5, 6, 7)), Branch((1,), (8,))))
    assert layout.token_ids.tolist() == [1, 2, 5, 6, 1, 1, 2, 5, 6, 1]
    assert layout.position_ids.tolist() == [3, 4, 5, 6, 3, 7, 8, 9, 10, 7]
    assert layout.segments.tolist() == [0, 0, 0, 0, 1, 2, 2, 2, 2, 3]
    assert layout.rows.tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    assert layout.targets.tolist() == [5, 6, 7, 8, 5, 6, 7, 8]


def test_a_row_is_the_trajectory_up_to_its_last_boundary_and_then_the_branches():
    layout = lay_out_branches(request((1, 3), Branch((2,), (5, 6)), Branch((2,), (8,))))
    assert layout.row_ids.tolist() == [100, 101, 102, 2, 5, 2, 2, 5, 2]
    assert layout.row_positions.tolist() == [0, 1, 2, 1, 2, 1, 3, 4, 3]
    assert layout.row_picked.tolist() == [3, 4, 5, 6, 7, 8]
    assert len(layout) == len(layout.packed_row()) == 9
    means = layout.mean_by_branch(torch.tensor([-1.0, -3.0, -5.0, -2.0, -4.0, -7.0]))
    assert means.tolist() == [[-2.0, -5.0], [-3.0, -7.0]]


def test_without_an_opening_the_branch_repeats_the_last_prefix_token():
    layout = lay_out_branches(request((1, 4), Branch((), (5, 6))))
    assert layout.token_ids.tolist() == [100, 5, 103, 5]
    assert layout.starts.tolist() == [0, 0, 3, 3]
    assert layout.position_ids.tolist() == [0, 1, 3, 4]
    assert layout.targets.tolist() == [5, 6, 5, 6]


def test_blocks_see_the_trajectory_up_to_the_boundary_and_their_own_branch():
    layout = lay_out_branches(request((3, 7), Branch((1,), (5, 6)), Branch((1,), (8,))))
    (block,) = layout.blocks()
    assert block.num_seen == 7
    assert block.mask_QK[:, :7].sum(1).tolist() == [3, 3, 3, 7, 7, 7]
    assert block.mask_QK[:3, 7:].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
    ]


@pytest.mark.parametrize(
    ("block_tokens", "sizes", "seen"),
    [(1, [2, 1, 2, 1], [3, 3, 7, 7]), (3, [3, 3], [3, 7]), (99, [6], [7])],
)
def test_blocks_hold_whole_branches(block_tokens, sizes, seen):
    layout = lay_out_branches(request((3, 7), Branch((1,), (5, 6)), Branch((1,), (8,))))
    blocks = layout.blocks(block_tokens)
    assert [len(block.mask_QK) for block in blocks] == sizes
    assert [block.num_seen for block in blocks] == seen


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_every_item_is_in_one_batch_that_keeps_the_budget_unless_alone(costs, budget):
    batches = plan_batches(costs, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(costs)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(costs[index] for index in batch) <= budget


def test_items_of_similar_cost_share_a_batch_longest_first():
    assert plan_batches([3, 9, 4, 10], token_budget=20) == [[3, 1], [2, 0]]


def test_a_missing_score_is_refused_with_rollout_boundary_and_answer():
    scores = torch.zeros(3, 2)
    scores[2, 1] = float("nan")
    with pytest.raises(CreditError, match="rollout q7/3 at boundary 2 for answer 1, got nan"):
        require_finite_scores(scores, "q7/3")


def test_an_answer_without_tokens_is_refused():
    with pytest.raises(CreditError, match="at least one answer token"):
        Branch((1, 2), ())


@pytest.mark.parametrize("prefix_ends", [(), (0, 3), (3, 3), (5, 4), (3, 21)])
def test_prefixes_that_do_not_rise_within_the_rollout_are_refused(prefix_ends):
    with pytest.raises(CreditError, match=r"within 1 \.\. 20 in rollout q/0"):
        request(prefix_ends, Branch((), (1,)))


def test_a_request_without_an_answer_is_refused():
    with pytest.raises(CreditError, match="at least one answer branch for rollout q/0"):
        request((3,))
