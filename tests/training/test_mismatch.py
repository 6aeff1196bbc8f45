import math

import pytest
import torch

from trace_pl.losses.mismatch import SamplerMismatch


def test_figures_worked_out_by_hand():
    mismatch = SamplerMismatch()
    trainer = torch.tensor([[0.4, 0.9], [0.2, 0.3]]).log()
    sampler = torch.tensor([[0.25, 0.9], [0.05, 0.6]]).log()
    mask = torch.tensor([[True, False], [True, True]])
    mismatch.add(trainer[:1], sampler[:1], mask[:1])
    mismatch.add(trainer[1:], sampler[1:], mask[1:])
    found = mismatch.compute()
    weights = [1.6, 4.0, 0.5]
    assert found["abs_nats"] == pytest.approx((math.log(1.6) + math.log(4) + math.log(2)) / 3)
    assert found["kl"] == pytest.approx(sum(w - 1 - math.log(w) for w in weights) / 3)
    assert found["weights_above_cap"] == pytest.approx(1 / 3)
    # Probabilities (0.4, 0.2, 0.3) and (0.25, 0.05, 0.6).
    expected = torch.corrcoef(torch.tensor([[0.4, 0.2, 0.3], [0.25, 0.05, 0.6]]))[0, 1]
    assert found["probability_correlation"] == pytest.approx(float(expected), abs=1e-6)


def test_equal_sides_differ_by_nothing_and_every_epoch_begins_anew():
    mismatch = SamplerMismatch()
    logprobs = -torch.rand(3, 4)
    mismatch.add(logprobs, logprobs, torch.ones(3, 4, dtype=torch.bool))
    found = mismatch.compute()
    assert found["probability_correlation"] == pytest.approx(1.0)
    assert [found[k] for k in ("abs_nats", "kl", "weights_above_cap")] == [0.0, 0.0, 0.0]
    assert all(math.isnan(value) for value in mismatch.compute().values())
