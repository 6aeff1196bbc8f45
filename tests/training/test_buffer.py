import pytest
import torch
from builders import group
from lightning.pytorch.utilities.data import sized_len
from torch.utils.data import DataLoader

from trace_pl.errors import CreditError, RolloutError
from trace_pl.training.buffer import RolloutBuffer
from trace_pl.training.minibatch import Minibatch
from trace_pl.training.row_plan import BatchPlan
from trace_pl.types import RolloutGroup, TokenAdvantages


def credited(plan: BatchPlan, epoch: int = 0, num_groups: int = 3) -> RolloutBuffer:
    buffer = RolloutBuffer([group([0, 1, 0, 1], n) for n in range(num_groups)], plan, epoch)
    buffer.assign(
        [
            TokenAdvantages(r.id, r.loss_mask * float(i + 1), 0.0, torch.zeros(r.num_turns))
            for i, r in enumerate(buffer.rollouts)
        ]
    )
    return buffer


def test_every_row_is_read_once_in_each_pass():
    buffer = credited(BatchPlan(num_steps=2, num_passes=3, tokens_per_forward=40))
    batches = list(buffer)
    per_pass = 2 * buffer.micro_batches
    assert buffer.micro_batches > 1
    assert len(batches) == len(buffer) == 3 * per_pass
    for start in range(0, len(batches), per_pass):
        ids = [id_ for batch in batches[start : start + per_pass] for id_ in batch.rollout_ids]
        assert sorted(ids) == sorted(r.id for r in buffer.rollouts)


def test_micro_batches_of_a_step_share_the_token_count_of_the_step():
    buffer = credited(BatchPlan(num_steps=2, tokens_per_forward=40))
    batches, half = list(buffer), buffer.micro_batches
    for step in (batches[:half], batches[half:]):
        tokens = float(sum(int(batch.mask_BT.sum()) for batch in step))
        assert {batch.num_loss_tokens for batch in step} == {tokens}


def test_no_forward_reads_more_tokens_than_allowed():
    for batch in credited(BatchPlan(num_steps=2, tokens_per_forward=60)):
        lengths = {len(row) for row in batch.token_ids_BT}
        assert len(batch.rollout_ids) == 1 or sum(lengths) <= 60
    for batch in credited(BatchPlan(tokens_per_forward=1)):
        assert len(batch.rollout_ids) == 1


def test_a_step_with_fewer_rows_than_micro_batches_is_filled_with_rows_of_zero_weight():
    # 12 rows in 5 steps: two of three rows, three of two.
    batches = list(credited(BatchPlan(num_steps=5, tokens_per_forward=1)))
    assert len(batches) == 15
    assert sum(bool(batch.mask_BT.any()) for batch in batches) == 12


@pytest.mark.parametrize(
    ("num_steps", "version", "expected"),
    [(1, None, True), (1, 0, True), (1, 1, False), (2, 0, False)],
)
def test_only_one_step_on_fresh_rollouts_is_on_policy(num_steps, version, expected):
    groups = [group([0, 1])]  # sampled by version 0
    buffer = RolloutBuffer(groups, BatchPlan(num_steps), policy_version=version)
    assert buffer.is_on_policy is expected
    assert {batch.is_on_policy for batch in buffer.forward_batches()} == {expected}


def test_reading_before_credit_is_an_error():
    buffer = RolloutBuffer([group([0, 1])], BatchPlan())
    with pytest.raises(CreditError, match="none assigned"):
        next(iter(buffer))


def test_credit_of_another_shape_is_refused_and_names_the_rollout():
    buffer = RolloutBuffer([group([0, 1])], BatchPlan())
    short = [TokenAdvantages(r.id, torch.zeros(3), 0.0, torch.zeros(0)) for r in buffer.rollouts]
    with pytest.raises(CreditError, match="q0/0"):
        buffer.assign(short)


def test_an_epoch_without_rollouts_is_an_error():
    empty = RolloutBuffer([RolloutGroup(group([0]).question, ())], BatchPlan())
    with pytest.raises(RolloutError, match="infrastructure"):
        empty.require_rollouts()


def test_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        plan = BatchPlan(num_steps=4, seed=seed)
        return [batch.rollout_ids for batch in credited(plan, epoch)]

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2)
    assert order(0, 1) != order(1, 1)


def test_rows_are_padded_on_the_right_and_padding_is_masked():
    buffer = credited(BatchPlan())
    (batch,) = buffer
    by_id = {r.id: r for r in buffer.rollouts}
    for row, rollout_id in enumerate(batch.rollout_ids):
        length = len(by_id[rollout_id].token_ids)
        assert torch.equal(batch.token_ids_BT[row, :length], by_id[rollout_id].token_ids)
        assert not batch.mask_BT[row, length:].any()
        assert not batch.advantages_BT[row, length:].any()


def test_the_loader_is_sized_so_that_lightning_prefetches_nothing():
    loader = DataLoader(credited(BatchPlan(num_steps=3)), batch_size=None)
    assert sized_len(loader) == 3


def test_moving_a_minibatch_keeps_every_dtype():
    (batch,) = credited(BatchPlan())
    moved = batch.to("cpu")
    assert isinstance(moved, Minibatch)
    assert moved.advantages_BT.dtype == torch.float32
    assert moved.token_ids_BT.dtype == torch.int64
    assert moved.old_logprobs_BT is None
