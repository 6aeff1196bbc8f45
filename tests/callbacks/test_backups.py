import pytest
import torch

from callbacks import (
    FlippedCredit,
    KStepTD,
    MonteCarlo,
    NoisyCredit,
    PositiveGain,
    ReturnToGo,
    ShuffledCredit,
)
from trace_pl.errors import ConfigError
from trace_pl.types import ProbeValues

VALUES = ProbeValues(
    "q0/0",
    torch.tensor([-4.0, -3.0, -3.2, -0.5, -0.4]),
    torch.tensor([0.0, 0.279585, 0.217065, 1.921813, 2.104134]),
)
CREDIT = torch.tensor([0.541233, 0.581133, 1.028114, 0.182322])
CLOSE = {"atol": 1e-5, "rtol": 0.0}


def test_the_default_backup_of_the_worked_example():
    credit = KStepTD().backup(VALUES)
    torch.testing.assert_close(credit.credit, CREDIT, **CLOSE)
    assert (credit.num_steps, credit.discount) == (3, 0.8)


def test_one_step_credit_telescopes_to_the_last_value():
    credit = KStepTD(num_steps=1).backup(VALUES)
    torch.testing.assert_close(credit.credit.sum(), VALUES.values[-1], **CLOSE)


def test_monte_carlo_looks_to_the_end_of_each_rollout():
    credit = MonteCarlo(discount=0.8).backup(VALUES)
    gains = [0.279585, -0.062520, 1.704748, 0.182321]
    weights = [1.0, 0.8, 0.64, 0.512]
    first = sum(w * g for w, g in zip(weights, gains, strict=True)) / sum(weights)
    torch.testing.assert_close(credit.credit[0], torch.tensor(first), **CLOSE)
    torch.testing.assert_close(credit.credit[1:], CREDIT[1:], **CLOSE)
    # Four turns: the outcome reaches all of them.
    assert (credit.num_steps, credit.discount) == (4, 0.8)


def test_shuffled_credit_is_the_same_credit_on_other_turns():
    torch.manual_seed(0)
    dealt = [ShuffledCredit().backup(VALUES).credit for _ in range(50)]
    for credit in dealt:
        torch.testing.assert_close(credit.sort().values, CREDIT.sort().values, **CLOSE)
    # Over many deals every turn gets the mean: nothing of the order is left.
    mean = torch.stack(dealt).mean(dim=0)
    torch.testing.assert_close(mean, CREDIT.mean().expand(4), atol=0.15, rtol=0.0)


STEPS = ProbeValues("q0/0", -torch.ones(4), torch.tensor([0.0, 0.5, 0.25, 1.0]))


def test_the_return_to_go_is_what_is_gained_from_a_turn_on():
    # Gains 0.5, -0.25 and 0.75.
    torch.testing.assert_close(ReturnToGo().backup(STEPS).credit, torch.tensor([1.0, 0.5, 0.75]))
    discounted = ReturnToGo(discount=0.5).backup(STEPS).credit
    torch.testing.assert_close(discounted, torch.tensor([0.5625, 0.125, 0.75]))


def test_a_turn_that_lowers_the_belief_is_not_blamed_where_only_gains_count():
    torch.testing.assert_close(PositiveGain().backup(STEPS).credit, torch.tensor([0.5, 0.0, 0.75]))


def test_controls_spoil_the_credit_of_the_backup_that_they_are_given():
    made = ReturnToGo().backup(STEPS)
    flipped = FlippedCredit(ReturnToGo()).backup(STEPS)
    torch.testing.assert_close(flipped.credit, -made.credit)
    assert (flipped.num_steps, flipped.discount) == (made.num_steps, made.discount) == (3, 1.0)
    torch.manual_seed(0)
    noisy = NoisyCredit(ReturnToGo(), noise=2.0)
    noise = torch.stack([noisy.backup(STEPS).credit - made.credit for _ in range(400)])
    torch.testing.assert_close(noise.std(), torch.tensor(2.0), atol=0.1, rtol=0.0)
    torch.testing.assert_close(noise.mean(dim=0), torch.zeros(3), atol=0.3, rtol=0.0)
    with pytest.raises(ConfigError, match=r"noise of at least 0 nats, got -1"):
        NoisyCredit(noise=-1.0)


def test_a_rollout_without_turns_has_no_credit():
    none = ProbeValues("q0/0", torch.tensor([-1.0]), torch.tensor([0.0]))
    for backup in (KStepTD(), MonteCarlo(), ShuffledCredit(), ReturnToGo(), PositiveGain()):
        assert len(backup.backup(none).credit) == 0
