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


def test_many_chunks_in_bfloat16_give_the_gradient_of_the_head_as_one_piece_does():
    gradients = {}
    for dtype, num_chunks in ((torch.float64, 1), (torch.bfloat16, 1), (torch.bfloat16, 150)):
        head, hidden, targets = given(2400, 64, 1024)
        weights = torch.randn(len(targets))
        head, hidden = head.bfloat16().to(dtype), hidden.detach().bfloat16().to(dtype)
        size = 4 * 1024 * len(targets) // num_chunks
        logprobs = token_logprobs(head, hidden, targets, logit_bytes=size)
        (logprobs * weights).sum().backward()
        gradients[dtype, num_chunks] = head.weight.grad.double()
    exact = gradients.pop((torch.float64, 1))
    one, many = (float((found - exact).norm() / exact.norm()) for found in gradients.values())
    assert one < 0.003
    assert many < 0.0035  # 0.012 if summed up in bfloat16


def test_an_adapter_of_the_head_gets_its_gradient_from_every_chunk():
    base, hidden, targets = given()
    down, up = nn.Linear(8, 2, bias=False).double(), nn.Linear(2, 50, bias=False).double()

    class Adapted(nn.Linear):
        def forward(self, rows):
            return super().forward(rows) + self.up(self.down(rows))

    head = Adapted(8, 50, bias=False, dtype=torch.float64)
    head.weight, head.down, head.up = base.weight.requires_grad_(False), down, up
    inputs = (hidden, down.weight, up.weight)
    got = torch.autograd.grad(token_logprobs(head, hidden, targets, 4 * 50 * 6).sum(), inputs)
    expected = torch.autograd.grad(plain(head, hidden, targets).sum(), inputs)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_chunks_compute_in_the_mixed_precision_of_their_forward():
    head, hidden, targets = given(dtype=torch.float32)
    gradients = []
    for chunk in (23, 6):
        with torch.autocast("cpu", torch.bfloat16):
            logprobs = token_logprobs(head, hidden, targets, 4 * 50 * chunk)
        gradients.append(torch.autograd.grad(logprobs.sum(), (hidden, head.weight)))
    torch.testing.assert_close(gradients[0], gradients[1], atol=0.01, rtol=0.01)
    assert torch.equal(gradients[0][0], gradients[1][0])  # of one row, whatever lies beside it


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
