"""Each ablation of the loss trains otherwise than its base, in every complete run."""

import json
from functools import cache

import pytest
import torch
from fixed_experience import FixedExperience, train
from jsonargparse import Namespace
from lightning.pytorch.callbacks import Callback
from parsed import CONFIGS, RUNS, parsed

from trace_pl.commands.plan.from_config import build_loss
from trace_pl.losses import ConstantLength, TokenClip
from trace_pl.training.row_plan import BatchPlan

ABLATIONS = [
    path for path in sorted((CONFIGS / "ablations").iterdir()) if "\n  loss:" in path.read_text()
]
STARTS_ALIKE = {"clip_higher", "kl"}
"""Nothing is clipped, and nothing has left the reference, before the first step."""


class KeepGradients(Callback):
    def __init__(self):
        self.steps = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradients = [p.grad.flatten() for p in pl_module.policy.parameters()]
        self.steps.append(torch.cat(gradients).clone())


def fast(parameters):
    return torch.optim.SGD(parameters, lr=3.0)


@cache
def gradients(folder, loss, num_steps):
    """Return the gradient of each optimizer step of two epochs on the same rollouts."""
    kept = KeepGradients()
    data = FixedExperience(BatchPlan(num_steps, token_limit=40))
    train(folder, data=data, callbacks=[kept], epochs=2, model={"loss": loss, "optimizer": fast})
    return kept.steps


@cache
def of_settings(folder, loss, num_steps):
    """Return the gradients under a loss that is given as JSON: many runs share theirs."""
    settings = json.loads(loss)
    return gradients(folder, build_loss(settings and Namespace(settings)), num_steps)


def settings(*paths):
    config = parsed(*(f"--config={path}" for path in paths))
    return json.dumps(config["model"]["loss"].as_dict()), config["data"]["num_steps"]


def test_there_are_the_ablations_of_the_loss():
    assert {path.stem for path in ABLATIONS} == {
        *("clip_higher", "dr_grpo", "gspo", "importance_weights", "kl", "sequence_clip"),
        "trajectory_mean",
    }


@pytest.mark.parametrize("path", ABLATIONS, ids=lambda path: path.stem)
@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.stem)
def test_an_ablation_of_the_loss_trains_otherwise_than_its_base(tiny_model_dir, run, path):
    loss, num_steps = settings(run, path)
    base, _ = settings(run)
    changed = of_settings(tiny_model_dir, loss, num_steps)
    plain = of_settings(tiny_model_dir, base, num_steps)
    is_same = [
        torch.allclose(a, b, rtol=1e-5, atol=1e-9) for a, b in zip(changed, plain, strict=True)
    ]
    assert is_same[0] == (path.stem in STARTS_ALIKE)
    assert not is_same[-1]


def test_with_one_step_on_its_rollouts_no_clip_ever_binds(tiny_model_dir):
    """Why those ablations name their steps: old and current policy are one."""
    narrow, wide = TokenClip(0.001, 0.001), TokenClip(0.5, 0.9)
    one = zip(*(gradients(tiny_model_dir, loss, 1) for loss in (narrow, wide)), strict=True)
    assert all(torch.equal(a, b) for a, b in one)
    four = zip(*(gradients(tiny_model_dir, loss, 4) for loss in (narrow, wide)), strict=True)
    assert not all(torch.allclose(a, b) for a, b in four)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_the_divisor_of_dr_grpo_is_the_same_for_any_micro_batches(tiny_model_dir, num_steps):
    loss, kept = TokenClip(normaliser=ConstantLength()), KeepGradients()
    data = FixedExperience(BatchPlan(num_steps, tokens_per_forward=1, token_limit=40))
    assert data.buffer.micro_batches > 1
    settings = {"loss": loss, "optimizer": fast}
    train(tiny_model_dir, data=data, callbacks=[kept], epochs=2, model=settings)
    for part, whole in zip(kept.steps, gradients(tiny_model_dir, loss, num_steps), strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-3, atol=1e-5)
