import pytest
import torch
from torch import nn

from trace_pl.models.head import token_logprobs


def given(rows=23, width=8, vocab=50, dtype=torch.float64):
    torch.manual_seed(0)
    head = nn.Linear(width, vocab, bias=False, dtype=dtype)
    hidden = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    return head, hidden, torch.randint(vocab, (rows,))


def plain(head, hidden, targets):
    return head(hidden).log_softmax(-1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("chunk_rows", [1, 4, 23, 1000])
def test_chunks_give_the_log_probs_and_gradients_of_all_logits(chunk_rows):
    head, hidden, targets = given()
    weights = torch.randn(len(targets)).double()
    got = token_logprobs(head, hidden, targets, logit_bytes=4 * 50 * chunk_rows)
    expected = plain(head, hidden, targets)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    inputs = (hidden, head.weight)
    for one, other in zip(
        torch.autograd.grad((got * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_no_more_logits_are_alive_than_asked_for():
    head, hidden, targets = given(dtype=torch.float32)
    seen = []
    head.register_forward_hook(lambda module, inputs, logits: seen.append(len(logits)))
    token_logprobs(head, hidden, targets, logit_bytes=4 * 50 * 6).sum().backward()
    # Four chunks, each computed again for the gradient.
    assert sorted(seen) == [5, 5, 6, 6, 6, 6, 6, 6]


def test_one_row_is_read_even_when_its_logits_are_too_many_bytes():
    head, hidden, targets = given(rows=3)
    got = token_logprobs(head, hidden, targets, logit_bytes=1)
    torch.testing.assert_close(got.double(), plain(head, hidden, targets), atol=1e-5, rtol=1e-5)


def test_no_rows_give_no_log_probs_and_a_gradient_of_zero():
    head, hidden, targets = given(rows=0)
    token_logprobs(head, hidden, targets).sum().backward()
    assert head.weight.grad is not None
    assert not head.weight.grad.any()
