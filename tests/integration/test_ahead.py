"""Rollouts of the next epoch are collected while this one trains."""

import lightning
import pytest
from lightning.pytorch.callbacks import Callback

from callbacks import FrozenReferenceProber, KStepTD, ToolCallSegmenter, TraceAnchor
from trace_pl.engines.server.engine import ServerEngine
from trace_pl.engines.transformers import HFEngine
from trace_pl.errors import ConfigError
from trace_pl.rollout.chat.answer_formats import AnswerTags
from trace_pl.rollout.trajectory import AgentLimits
from trace_pl.tasks.closed_web.task import ClosedWebTask
from trace_pl.training.credit_assigner import CreditAssigner
from trace_pl.training.datamodule import RolloutDataModule
from trace_pl.training.module import TraceModule


class Watch(Callback):
    """Keeps which policy sampled and which trained in every epoch, and where questions stand."""

    def __init__(self):
        self.versions = []
        self.on_policy = []
        self.cursors = []
        self.questions = []

    def on_train_epoch_start(self, trainer, pl_module):
        buffer = trainer.datamodule.buffer
        (sampled,) = {rollout.policy_version for rollout in buffer.rollouts}
        self.versions.append((sampled, pl_module.policy_version))
        self.on_policy.append(buffer.is_on_policy)
        self.questions.append([group.question.id for group in buffer.groups])

    def on_train_epoch_end(self, trainer, pl_module):
        self.cursors.append(trainer.datamodule.state_dict()["cursor"])


def make_data(engine):
    return RolloutDataModule(
        ClosedWebTask((2,)),
        engine,
        group_size=2,
        questions_per_epoch=3,
        evaluation_questions=2,
        limits=AgentLimits(3, 24, 600),
        answer_format=AnswerTags(instruction=""),  # the built-in model knows them
        max_staleness=1,
    )


def test_every_epoch_but_the_first_trains_on_the_rollouts_of_the_policy_before(forks_servers):
    watch = Watch()
    data = make_data(
        lambda path: ServerEngine(path, 1024, max_num_seqs=8, kv_cache_gib=0.1, seed=0)
    )
    stages = (ToolCallSegmenter(), FrozenReferenceProber(), KStepTD(), TraceAnchor())
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        callbacks=[*stages, CreditAssigner(), watch],
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(TraceModule(), datamodule=data)
    assert watch.versions == [(0, 0), (0, 1), (1, 2)]
    assert watch.on_policy == [True, False, False]
    # What is under way is no part of a checkpoint: a resumed run asks these questions again.
    assert watch.cursors == [3, 6, 9]
    assert len({id_ for ids in watch.questions for id_ in ids}) == 9
    assert 0.0 < trainer.callback_metrics["loss/correction"] < 1.0


def test_an_engine_inside_the_trainer_is_refused():
    with pytest.raises(ConfigError, match="process of its own"):
        make_data(lambda path: HFEngine(path, 1024)).open()


def test_extra_questions_and_staleness_are_refused_together():
    with pytest.raises(ConfigError, match="got both"):
        RolloutDataModule(ClosedWebTask((2,)), HFEngine, extra_questions=1, max_staleness=1)
