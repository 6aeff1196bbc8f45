import pytest
import torch

from trace_pl.errors import RolloutError
from trace_pl.rollout.record import TokenRecord
from trace_pl.types import Grade, Question, StopReason, TokenKind, ToolCall, ToolResult

QUESTION = Question("q1", "Who?", ("Mira Holt",))


def one_turn_record() -> TokenRecord:
    record = TokenRecord()
    record.append([10, 11, 12], TokenKind.PROMPT)
    record.append([20], TokenKind.TEMPLATE)
    record.append([30, 31, 2], TokenKind.ACTION, [-0.5, -0.25, -1.0])
    record.append([21], TokenKind.TEMPLATE)
    record.append([40, 41], TokenKind.OBSERVATION)
    record.append([22], TokenKind.TEMPLATE)
    record.close_turn(ToolCall("search", {"query": "x"}), ToolResult("y"))
    record.append([20], TokenKind.TEMPLATE)
    record.append([50, 2], TokenKind.ACTION, [-0.125, -2.0])
    return record


def test_every_mask_and_span_comes_from_the_record():
    grade = Grade(1.1, is_correct=True)
    rollout = one_turn_record().finish(QUESTION, 3, StopReason.ANSWERED, "Mira Holt", grade, 9)

    assert rollout.token_ids.tolist() == [10, 11, 12, 20, 30, 31, 2, 21, 40, 41, 22, 20, 50, 2]
    assert rollout.kinds.tolist() == [0, 0, 0, 3, 1, 1, 1, 3, 2, 2, 3, 3, 1, 1]
    assert rollout.loss_mask.nonzero().flatten().tolist() == [4, 5, 6, 12, 13]
    torch.testing.assert_close(
        rollout.logprobs,
        torch.tensor([0, 0, 0, 0, -0.5, -0.25, -1, 0, 0, 0, 0, 0, -0.125, -2]),
        rtol=0,
        atol=0,
    )
    assert rollout.prompt_length == 3
    (turn,) = rollout.turns
    assert (turn.action_start, turn.action_stop, turn.observation_stop) == (4, 7, 11)
    assert (rollout.index, rollout.policy_version, rollout.reward) == (3, 9, 1.1)
    assert rollout.is_correct


@pytest.mark.parametrize(
    ("kind", "logprobs"),
    [
        (TokenKind.ACTION, None),
        (TokenKind.ACTION, [-1.0]),
        (TokenKind.ACTION, [-1.0, -1.0, -1.0]),
        (TokenKind.OBSERVATION, [-1.0, -1.0]),
        (TokenKind.TEMPLATE, []),
    ],
)
def test_log_probs_go_with_sampled_tokens_one_by_one(kind, logprobs):
    record = TokenRecord()
    with pytest.raises(RolloutError, match="one sampling log-prob for each of 2 ACTION tokens"):
        record.append([5, 6], kind, logprobs)
    assert len(record) == 0


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_log_prob_that_is_not_finite_is_refused(value):
    with pytest.raises(RolloutError, match="finite sampling log-probs"):
        TokenRecord().append([5, 6], TokenKind.ACTION, [-1.0, value])


def test_a_rollout_without_turns_keeps_its_answer_tokens():
    record = TokenRecord()
    record.append([10], TokenKind.PROMPT)
    record.append([5, 2], TokenKind.ACTION, [-1.0, -1.0])
    rollout = record.finish(QUESTION, 0, StopReason.ANSWERED, None, Grade(0.5, is_correct=False), 0)
    assert rollout.turns == ()
    assert rollout.loss_mask.tolist() == [False, True, True]
