import pytest
import torch

from trace_pl.errors import ConfigError
from trace_pl.losses import LossInputs, TokenClip


def inputs(ratio, advantages, mask=None, num=None):
    ratio = torch.tensor([ratio], dtype=torch.float64)
    mask = torch.ones_like(ratio, dtype=torch.bool) if mask is None else torch.tensor([mask])
    old = torch.full_like(ratio, -1.0)
    new = (old + ratio.log()).requires_grad_()
    return new, LossInputs(
        new, old, torch.tensor([advantages], dtype=torch.float64), mask, num or float(mask.sum())
    )


def test_surrogate_of_a_worked_example():
    # ratios 1.0, 1.5 (clipped to 1.2), 0.5 (clipped to 0.8, the worse of two for A < 0)
    _, given = inputs([1.0, 1.5, 0.5], [1.0, 2.0, -1.0])
    loss = TokenClip()(given).loss
    torch.testing.assert_close(loss.item(), -(1.0 + 2.4 - 0.8) / 3, atol=1e-12, rtol=0)


def test_no_gradient_where_the_clip_binds_and_full_gradient_elsewhere():
    new, given = inputs([1.0, 1.5, 0.5, 0.5], [1.0, 2.0, -1.0, 1.0])
    TokenClip()(given).loss.backward()
    torch.testing.assert_close(new.grad, torch.tensor([[-0.25, 0.0, 0.0, -0.125]]).double())


def test_masked_tokens_have_exactly_zero_gradient_even_when_their_log_probs_are_garbage():
    new, given = inputs([1.0, float("inf"), 1.0], [1.0, 5.0, 1.0], mask=[True, False, True])
    TokenClip()(given).loss.backward()
    assert new.grad is not None
    assert new.grad[0, 1].item() == 0.0
    torch.testing.assert_close(new.grad[0, 0].item(), -0.5)


def test_on_policy_gradient_is_plain_policy_gradient():
    torch.manual_seed(0)
    logits = torch.randn(1, 7, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(1, 7, dtype=torch.float64)
    mask = torch.ones(1, 7, dtype=torch.bool)
    logprobs = torch.nn.functional.logsigmoid(logits)
    given = LossInputs(logprobs, logprobs.detach(), advantages, mask, 7.0)
    got = torch.autograd.grad(TokenClip()(given).loss, logits)[0]
    logprobs = torch.nn.functional.logsigmoid(logits)
    expected = torch.autograd.grad(-(logprobs * advantages).mean(), logits)[0]
    torch.testing.assert_close(got, expected)


def test_loss_gradient_agrees_with_finite_differences():
    torch.manual_seed(1)
    old = -torch.rand(2, 5, dtype=torch.float64)
    new = (old + 0.1 * torch.randn(2, 5, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(2, 5, dtype=torch.float64)
    mask = torch.rand(2, 5) > 0.3
    loss = TokenClip(0.25, 0.35)
    assert torch.autograd.gradcheck(
        lambda x: loss(LossInputs(x, old, advantages, mask, 10.0)).loss, (new,)
    )


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.2), (1.0, 0.2), (0.2, 0.0), (-1.0, 0.2)])
def test_impossible_clip_ranges_are_refused(low, high):
    with pytest.raises(ConfigError, match="clip_low"):
        TokenClip(low, high)
