import math
from dataclasses import replace

import pytest
import torch

from trace_pl.errors import ConfigError
from trace_pl.losses import (
    ConstantLength,
    KLPenalty,
    LossInputs,
    SequenceClip,
    TokenClip,
    TokenMean,
    TrajectoryMean,
    TruncatedSequenceWeights,
    TruncatedTokenWeights,
)

EXACT = {"atol": 1e-12, "rtol": 0.0}


def given(ratio, advantages, mask=None, sampler_ratio=None, reference=None):
    """Return log-probs with gradient and loss inputs: rows of ratios to an old log-prob of -1."""
    ratio = torch.tensor(ratio, dtype=torch.float64)
    mask = torch.ones_like(ratio, dtype=torch.bool) if mask is None else torch.tensor(mask)
    old = torch.full_like(ratio, -1.0)
    new = (old + ratio.log()).requires_grad_()
    sampler = old if sampler_ratio is None else old - torch.tensor(sampler_ratio).double().log()
    if reference is not None:
        reference = torch.tensor(reference, dtype=torch.float64)
    advantages = torch.tensor(advantages, dtype=torch.float64)
    num_tokens, num_rollouts = float(mask.sum()), float(mask.any(dim=1).sum())
    return new, LossInputs(new, old, sampler, advantages, mask, num_tokens, num_rollouts, reference)


def test_token_surrogate_of_a_worked_example():
    # ratios 1.0, 1.5 (clipped to 1.2), 0.5 (clipped to 0.8, the worse of two for A < 0)
    _, inputs = given([[1.0, 1.5, 0.5]], [[1.0, 2.0, -1.0]])
    loss = TokenClip()(inputs).loss
    torch.testing.assert_close(loss.item(), -(1.0 + 2.4 - 0.8) / 3, **EXACT)


def test_low_and_high_clip_are_two_numbers():
    _, inputs = given([[1.5, 0.5]], [[1.0, -1.0]])
    loss = TokenClip(clip_low=0.1, clip_high=0.4)(inputs).loss
    torch.testing.assert_close(loss.item(), -(1.4 - 0.9) / 2, **EXACT)


def test_no_gradient_where_the_clip_binds_and_full_gradient_elsewhere():
    new, inputs = given([[1.0, 1.5, 0.5, 0.5]], [[1.0, 2.0, -1.0, 1.0]])
    TokenClip()(inputs).loss.backward()
    torch.testing.assert_close(new.grad, torch.tensor([[-0.25, 0.0, 0.0, -0.125]]).double())


@pytest.mark.parametrize("loss", [TokenClip(), SequenceClip()])
def test_masked_tokens_have_exactly_zero_gradient_even_when_their_log_probs_are_garbage(loss):
    new, inputs = given([[1.0, float("inf"), 1.0]], [[1.0, 5.0, 1.0]], mask=[[True, False, True]])
    loss(inputs).loss.backward()
    assert new.grad is not None
    assert new.grad[0, 1].item() == 0.0
    torch.testing.assert_close(new.grad[0, 0].item(), -0.5)


def test_on_policy_gradient_is_plain_policy_gradient():
    torch.manual_seed(0)
    logits = torch.randn(1, 7, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(1, 7, dtype=torch.float64)
    mask = torch.ones(1, 7, dtype=torch.bool)
    logprobs = torch.nn.functional.logsigmoid(logits)
    old = logprobs.detach()
    for loss in (TokenClip(), SequenceClip()):
        inputs = LossInputs(logprobs, old, old, advantages, mask, 7.0, 1.0)
        got = torch.autograd.grad(loss(inputs).loss, logits, retain_graph=True)[0]
        expected = torch.autograd.grad(-(logprobs * advantages).mean(), logits, retain_graph=True)
        torch.testing.assert_close(got, expected[0])


def test_sequence_ratio_is_the_geometric_mean_of_the_rollouts_own_tokens():
    _, inputs = given(
        [[1.2, 1.3, 9.0], [0.5, 0.9, 0.7]],
        [[2.0, 2.0, 2.0], [-1.0, -1.0, -1.0]],
        mask=[[True, True, False], [True, True, True]],
    )
    ratios = [math.sqrt(1.2 * 1.3), (0.5 * 0.9 * 0.7) ** (1 / 3)]
    wide = SequenceClip(clip_low=0.9, clip_high=9.0, normaliser=TrajectoryMean())
    expected = -(2.0 * ratios[0] - ratios[1]) / 2
    torch.testing.assert_close(wide(inputs).loss.item(), expected, **EXACT)
    # Both clips bind: the first row's ratio is too high, the second's too low for A < 0.
    narrow = SequenceClip(clip_low=0.1, clip_high=0.1, normaliser=TrajectoryMean())
    outputs = narrow(inputs)
    torch.testing.assert_close(outputs.loss.item(), -(2.0 * 1.1 - 0.9) / 2, **EXACT)
    assert outputs.metrics["clip_fraction"] == 1.0


def test_trajectory_mean_weighs_rollouts_and_token_mean_weighs_tokens():
    mask = [[True, True, True, True], [True, False, False, False]]
    _, inputs = given([[1.0] * 4] * 2, [[1.0] * 4, [3.0] * 4], mask=mask)
    torch.testing.assert_close(TokenClip()(inputs).loss.item(), -(4 * 1.0 + 3.0) / 5, **EXACT)
    by_rollout = TokenClip(normaliser=TrajectoryMean())(inputs).loss
    torch.testing.assert_close(by_rollout.item(), -(1.0 + 3.0) / 2, **EXACT)


def test_a_constant_length_divides_by_what_a_rollout_may_have_and_not_by_what_it_has():
    """Dr. GRPO: (1/G) sum_i sum_t A_i over a constant of 10, with A = R - mean(R), R = 1 and 0."""
    mask = [[True, True, True, True], [True, False, False, False]]
    new, inputs = given([[1.0] * 4] * 2, [[0.5] * 4, [-0.5] * 4], mask=mask)
    loss = TokenClip(normaliser=ConstantLength())(replace(inputs, token_limit=10.0)).loss
    loss.backward()
    torch.testing.assert_close(loss.item(), -(4 * 0.5 - 1 * 0.5) / 2 / 10, **EXACT)
    assert new.grad is not None
    expected = [[-0.025] * 4, [0.025, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(new.grad, torch.tensor(expected, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("normaliser", [TokenMean(), TrajectoryMean(), ConstantLength()])
def test_two_ranks_give_the_mean_gradient_of_one_batch(normaliser):
    mask = [[True, True, True, True], [True, False, False, False]]
    ratio, advantages = [[1.1, 0.9, 1.0, 1.2], [0.8] * 4], [[0.5] * 4, [-0.5] * 4]
    loss = TokenClip(normaliser=normaliser)
    whole, inputs = given(ratio, advantages, mask=mask)
    loss(replace(inputs, token_limit=10.0)).loss.backward()
    ranks = []
    for row in range(2):  # counts are those of all ranks, divided by their number
        part, alone = given(ratio[row : row + 1], advantages[row : row + 1], mask[row : row + 1])
        counts = {"num_loss_tokens": 5.0 / 2, "num_rollouts": 2.0 / 2, "token_limit": 10.0}
        loss(replace(alone, **counts)).loss.backward()
        ranks.append(part.grad / 2)
    torch.testing.assert_close(torch.cat(ranks), whole.grad, **EXACT)


def test_a_row_without_sampled_tokens_adds_nothing_to_a_trajectory_mean():
    new, inputs = given([[1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0]] * 2, mask=[[True] * 2, [False] * 2])
    loss = TokenClip(normaliser=TrajectoryMean())(inputs).loss
    loss.backward()
    torch.testing.assert_close(loss.item(), -1.0, **EXACT)
    assert new.grad is not None
    assert new.grad[1].abs().sum() == 0.0


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        (TruncatedTokenWeights(cap=1.5), [0.5, 1.5]),
        (TruncatedSequenceWeights(cap=5.0), [2.0, 2.0]),
        (TruncatedSequenceWeights(cap=1.25), [1.25, 1.25]),
    ],
)
def test_importance_weights_scale_the_surrogate_up_to_their_cap(correction, weights):
    _, inputs = given([[1.0, 1.0]], [[1.0, -3.0]], sampler_ratio=[[0.5, 4.0]])
    outputs = TokenClip(correction=correction)(inputs)
    expected = -(weights[0] * 1.0 + weights[1] * -3.0) / 2
    torch.testing.assert_close(outputs.loss.item(), expected, **EXACT)
    excess = sum(abs(weight - 1.0) for weight in weights) / 2
    torch.testing.assert_close(outputs.metrics["correction"].item(), excess, **EXACT)


def test_by_default_only_rows_of_an_older_policy_are_weighed():
    _, inputs = given([[1.0, 1.0]], [[1.0, -3.0]], sampler_ratio=[[0.5, 4.0]])
    fresh = replace(inputs, is_on_policy=True)
    weighed = TokenClip(correction=TruncatedTokenWeights())(inputs).loss
    plain = TokenClip(correction=None)(inputs).loss
    assert not torch.isclose(weighed, plain)
    torch.testing.assert_close(TokenClip()(inputs).loss, weighed, **EXACT)
    torch.testing.assert_close(TokenClip()(fresh).loss, plain, **EXACT)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", -0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1.5)],
)
def test_kl_estimators_of_a_worked_example(estimator, expected):
    """The reference is half a nat surer than the policy; advantages are zero."""
    _, inputs = given([[1.0, 1.0]], [[0.0, 0.0]], reference=[[-0.5, -0.5]])
    outputs = TokenClip(kl=KLPenalty(0.1, estimator))(inputs)
    torch.testing.assert_close(outputs.loss.item(), 0.1 * expected, **EXACT)
    torch.testing.assert_close(outputs.metrics["reference_kl"].item(), expected, **EXACT)


@pytest.mark.parametrize(
    "loss",
    [
        TokenClip(0.25, 0.35),
        TokenClip(normaliser=TrajectoryMean(), correction=TruncatedTokenWeights()),
        TokenClip(correction=TruncatedSequenceWeights(3.0), kl=KLPenalty(0.3, "k1")),
        TokenClip(kl=KLPenalty(0.3, "k2")),
        TokenClip(kl=KLPenalty(0.3, "k3")),
    ],
    ids=repr,
)
def test_the_gradient_agrees_with_finite_differences(loss):
    torch.manual_seed(1)
    old = -torch.rand(3, 5, dtype=torch.float64)
    new = (old + 0.1 * torch.randn(3, 5, dtype=torch.float64)).requires_grad_()
    sampler = old + 0.1 * torch.randn(3, 5, dtype=torch.float64)
    reference = old + 0.1 * torch.randn(3, 5, dtype=torch.float64)
    advantages = torch.randn(3, 5, dtype=torch.float64)
    mask = torch.rand(3, 5) > 0.3

    def value(x):
        return loss(LossInputs(x, old, sampler, advantages, mask, 10.0, 3.0, reference)).loss

    assert torch.autograd.gradcheck(value, (new,))


def test_the_sequence_gradient_is_that_of_gspo_when_a_rollout_has_one_advantage():
    """With equal advantages in a row, GSPO-token has the gradient of s_i A_i / R."""
    torch.manual_seed(2)
    old = -torch.rand(2, 4, dtype=torch.float64)
    new = (old + 0.1 * torch.randn(2, 4, dtype=torch.float64)).requires_grad_()
    advantages = torch.tensor([[1.5], [-0.5]], dtype=torch.float64).expand(2, 4)
    mask = torch.ones(2, 4, dtype=torch.bool)
    loss = SequenceClip(clip_low=0.9, clip_high=9.0, normaliser=TrajectoryMean())
    got = torch.autograd.grad(
        loss(LossInputs(new, old, old, advantages, mask, 8.0, 2.0)).loss, new
    )[0]
    direct = -((new - old).mean(dim=1).exp() * advantages[:, 0]).mean()
    torch.testing.assert_close(got, torch.autograd.grad(direct, new)[0], **EXACT)


@pytest.mark.parametrize("loss_class", [TokenClip, SequenceClip])
@pytest.mark.parametrize(("low", "high"), [(0.0, 0.2), (1.0, 0.2), (0.2, 0.0), (-1.0, 0.2)])
def test_impossible_clip_ranges_are_refused(loss_class, low, high):
    with pytest.raises(ConfigError, match="clip_low"):
        loss_class(low, high)


@pytest.mark.parametrize("correction", [TruncatedTokenWeights, TruncatedSequenceWeights])
def test_a_cap_below_one_is_refused(correction):
    with pytest.raises(ConfigError, match="cap of at least 1"):
        correction(0.5)


@pytest.mark.parametrize("settings", [(0.0, "k3"), (float("nan"), "k3"), (0.1, "k4")])
def test_an_impossible_penalty_is_refused(settings):
    with pytest.raises(ConfigError, match="weight above 0"):
        KLPenalty(*settings)
