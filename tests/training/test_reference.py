"""The frozen reference is loaded for what reads it, and for nothing else."""

import shutil

import lightning
import pytest
from agent_runs import ANSWER, LIMITS, TEMPLATE, page
from fixed_experience import sgd
from scripted import FunctionTools, ScriptedEngine, search

from callbacks import (
    FrozenReferenceProber,
    KStepTD,
    NoProber,
    OutcomeOnly,
    PolicyProber,
    ToolCallSegmenter,
    TraceAnchor,
)
from trace_pl.distributed.strategy import ShardedStrategy
from trace_pl.errors import CreditError
from trace_pl.losses import KLPenalty, TokenClip
from trace_pl.models.adapters import LoRA
from trace_pl.models.loading import load_model
from trace_pl.training import policy_module
from trace_pl.training.credit_assigner import CreditAssigner
from trace_pl.training.datamodule import RolloutDataModule
from trace_pl.training.module import TraceModule
from trace_pl.types import Question

QUESTIONS = [Question(f"q{i}", f"Who built tower {i}?", ("Mira Holt",)) for i in range(4)]
KL = TokenClip(kl=KLPenalty(1e-3))


class SmallTask:
    def questions(self, split):
        return QUESTIONS

    def toolbox(self):
        return FunctionTools(page)


class AsksAnyway(FrozenReferenceProber):
    """Says that it reads nothing, and asks."""

    reader = "none"


@pytest.fixture
def loaded(monkeypatch):
    """Names of the references that were loaded."""
    names = []
    load = policy_module.load_reference

    def counted(name, *rest):
        names.append(name)
        return load(name, *rest)

    monkeypatch.setattr(policy_module, "load_reference", counted)
    return names


def make(folder, prober=None, anchor=None, **settings):
    """Return a module and a trainer whose engine follows a script."""
    module = TraceModule(str(folder), optimizer=sgd, **settings)
    stages = [ToolCallSegmenter(), prober or FrozenReferenceProber(), KStepTD()]
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[*stages, anchor or TraceAnchor(), CreditAssigner()],
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=9,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return module, trainer


def data(folder):
    engine = ScriptedEngine(TEMPLATE, {"*": [search("a"), ANSWER], "q1/0": ["<answer>no</answer>"]})
    return RolloutDataModule(
        SmallTask(),
        lambda path: engine,
        str(folder),
        questions_per_epoch=2,
        group_size=2,
        limits=LIMITS,
        parity_tolerance=1e9,  # a script has no log-probs to compare
    )


@pytest.mark.parametrize(
    ("settings", "is_loaded"),
    [
        ({}, True),
        ({"anchor": OutcomeOnly()}, False),
        ({"prober": PolicyProber()}, False),
        ({"prober": NoProber()}, False),
        ({"anchor": OutcomeOnly(), "loss": KL}, True),
        ({"adapter": LoRA(rank=2)}, False),
    ],
    ids=["TRACE", "outcome only", "policy asked", "nobody asked", "KL", "adapter"],
)
def test_a_fit_loads_the_reference_if_credit_or_loss_reads_it(
    tiny_model_dir, loaded, settings, is_loaded
):
    module, trainer = make(tiny_model_dir, **settings)
    trainer.fit(module, datamodule=data(tiny_model_dir))
    assert loaded == ([str(tiny_model_dir)] if is_loaded else [])
    assert module.needs_own_reference() == is_loaded
    assert trainer.callback_metrics["loss/policy_loss"].isfinite()


@pytest.mark.parametrize("what", ["validate", "test", "predict"])
def test_evaluation_loads_no_reference(tiny_model_dir, loaded, what):
    module, trainer = make(tiny_model_dir, loss=KL)
    getattr(trainer, what)(module, datamodule=data(tiny_model_dir))
    assert module.policy is not None
    assert loaded == []


def test_a_fit_after_an_evaluation_still_gets_its_reference(tiny_model_dir, loaded):
    module, trainer = make(tiny_model_dir)
    trainer.validate(module, datamodule=data(tiny_model_dir))
    policy = module.policy
    trainer.fit(module, datamodule=data(tiny_model_dir))
    assert loaded == [str(tiny_model_dir)]
    assert module.policy is policy


def test_a_prober_that_asks_though_it_says_otherwise_is_told(tiny_model_dir):
    module, trainer = make(tiny_model_dir, AsksAnyway())
    with pytest.raises(CreditError, match="class attribute `reader`"):
        trainer.fit(module, datamodule=data(tiny_model_dir))


def test_reading_a_reference_that_was_not_loaded_is_told(tiny_model_dir):
    module = TraceModule(str(tiny_model_dir))
    module.credit_reads_reference = False
    module.configure_model()
    reading = module.reading_reference()
    with pytest.raises(CreditError, match="Expected a frozen reference"), reading:
        pass


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("is_read", [False, True])
def test_a_sharded_strategy_is_asked_for_a_reference_only_if_one_is_read(
    tiny_model_dir, monkeypatch, on_cpu, is_read
):
    strategy, asked = ShardedStrategy(reference_on_cpu=on_cpu), []
    model = load_model(str(tiny_model_dir))
    monkeypatch.setattr(strategy, "load_policy", lambda *rest: model)
    monkeypatch.setattr(strategy, "load_reference", lambda name: asked.append(name) or model)
    module = TraceModule(str(tiny_model_dir))
    monkeypatch.setattr(module, "_strategy", lambda: strategy)
    module.credit_reads_reference = is_read
    module.configure_model()
    assert asked == [str(tiny_model_dir)] * is_read


def test_an_adapter_beside_another_reference_loads_that_one(tiny_model_dir, loaded, tmp_path):
    other = str(shutil.copytree(tiny_model_dir, tmp_path / "other"))
    module = TraceModule(str(tiny_model_dir), reference_name=other, adapter=LoRA(rank=2))
    module.configure_model()
    assert loaded == [other]
