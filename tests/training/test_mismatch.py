import math

import pytest
import torch

from trace_pl.training.metrics import EpochMetrics
from trace_pl.training.mismatch import add_mismatch


def test_figures_worked_out_by_hand():
    metrics = EpochMetrics()
    trainer = torch.tensor([[0.4, 0.9], [0.2, 0.3]]).log()
    sampler = torch.tensor([[0.25, 0.9], [0.05, 0.6]]).log()
    mask = torch.tensor([[True, False], [True, True]])
    add_mismatch(metrics, trainer[:1], sampler[:1], mask[:1])
    add_mismatch(metrics, trainer[1:], sampler[1:], mask[1:])
    found = metrics.compute()
    weights = [1.6, 4.0, 0.5]
    assert found["mismatch/abs_nats"] == pytest.approx(
        (math.log(1.6) + math.log(4) + math.log(2)) / 3
    )
    assert found["mismatch/kl"] == pytest.approx(sum(w - 1 - math.log(w) for w in weights) / 3)
    assert found["mismatch/weights_above_cap"] == pytest.approx(1 / 3)
    # Probabilities (0.4, 0.2, 0.3) and (0.25, 0.05, 0.6).
    expected = torch.corrcoef(torch.tensor([[0.4, 0.2, 0.3], [0.25, 0.05, 0.6]]))[0, 1]
    assert found["mismatch/probability_correlation"] == pytest.approx(float(expected), abs=1e-6)


def test_equal_sides_differ_by_nothing_and_every_epoch_begins_anew():
    metrics = EpochMetrics()
    logprobs = -torch.rand(3, 4)
    add_mismatch(metrics, logprobs, logprobs, torch.ones(3, 4, dtype=torch.bool))
    found = metrics.compute()
    assert found.pop("mismatch/probability_correlation") == pytest.approx(1.0)
    assert found == {
        "mismatch/abs_nats": 0.0,
        "mismatch/kl": 0.0,
        "mismatch/weights_above_cap": 0.0,
    }
    assert metrics.compute() == {}


def test_probabilities_near_one_that_differ_in_the_sixth_place_have_their_correlation():
    metrics = EpochMetrics()
    generator = torch.Generator().manual_seed(0)
    trainer = -1e-6 * torch.rand(5000, generator=generator)
    sampler = trainer + 1e-7 * torch.randn(5000, generator=generator)
    expected = torch.corrcoef(torch.stack([trainer, sampler]).double().exp())[0, 1]
    for part in torch.arange(5000).split(700):
        add_mismatch(metrics, trainer[part], sampler[part], torch.ones(len(part)).bool())
    found = metrics.compute()["mismatch/probability_correlation"]
    assert found == pytest.approx(float(expected), abs=1e-6)
