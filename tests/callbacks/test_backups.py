import torch

from callbacks import KStepTD, MonteCarlo, ShuffledKStepTD
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
    dealt = [ShuffledKStepTD().backup(VALUES).credit for _ in range(50)]
    for credit in dealt:
        torch.testing.assert_close(credit.sort().values, CREDIT.sort().values, **CLOSE)
    # Over many deals every turn gets the mean: nothing of the order is left.
    mean = torch.stack(dealt).mean(dim=0)
    torch.testing.assert_close(mean, CREDIT.mean().expand(4), atol=0.15, rtol=0.0)


def test_a_rollout_without_turns_has_no_credit():
    none = ProbeValues("q0/0", torch.tensor([-1.0]), torch.tensor([0.0]))
    for backup in (KStepTD(), MonteCarlo(), ShuffledKStepTD()):
        assert len(backup.backup(none).credit) == 0
