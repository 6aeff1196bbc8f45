"""Whole epochs of training on what a scripted engine says."""

import lightning
import torch
from agent_runs import LIMITS, page
from scripted import FunctionTools

from callbacks import FrozenReferenceProber, KStepTD, ToolCallSegmenter, TraceAnchor
from trace_pl.training.credit_assigner import CreditAssigner
from trace_pl.training.datamodule import RolloutDataModule
from trace_pl.training.module import TraceModule
from trace_pl.types import Question

QUESTIONS = [Question(f"q{i}", f"Who built tower {i}?", ("Mira Holt",)) for i in range(9)]


class SmallTask:
    """Nine questions and one tool."""

    def __init__(self, tools):
        self.tools = tools

    def questions(self, split):
        return QUESTIONS

    def toolbox(self):
        return FunctionTools(self.tools)


def make_data(model_dir, engine, tools=page, **settings):
    settings = {"questions_per_epoch": 3, "group_size": 2, "limits": LIMITS, **settings}
    return RolloutDataModule(
        SmallTask(tools),
        lambda path: engine,
        str(model_dir),
        parity_tolerance=1e9,  # a script has no log-probs to compare
        **settings,
    )


def fit(data, epochs=1, callbacks=()):
    """Train with TRACE and return the module and what it logged."""
    module = TraceModule(data.agent.model_name, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    stages = [ToolCallSegmenter(), FrozenReferenceProber(), KStepTD(), TraceAnchor()]
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[*stages, CreditAssigner(), *callbacks],
        reload_dataloaders_every_n_epochs=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    return module, trainer.callback_metrics
