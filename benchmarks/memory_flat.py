"""Resident memory over many small epochs of rollouts, credit and updates, in one process.

The built-in base model, real vLLM, the quickstart's stages. What the process holds after epoch 5
(everything was loaded and used by then) is compared with what it holds at the end.

    python benchmarks/memory_flat.py --epochs 50
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback

from callbacks import FrozenReferenceProber, KStepTD, ToolCallSegmenter, TraceAnchor
from trace_pl.engines.vllm.engine import VLLMEngine
from trace_pl.rollout.chat.answer_formats import AnswerTags
from trace_pl.rollout.trajectory import AgentLimits
from trace_pl.tasks.closed_web.task import ClosedWebTask
from trace_pl.training.credit_assigner import CreditAssigner
from trace_pl.training.datamodule import RolloutDataModule
from trace_pl.training.module import TraceModule

_WARM_EPOCHS = 5


class MemoryLog(Callback):
    """Notes resident memory in MiB after each epoch."""

    def __init__(self) -> None:
        """Start with an empty list."""
        self.mib: list[float] = []

    def on_train_epoch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Note it, once what only waits for the collector is gone."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.mib.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)


def train(sizes: argparse.Namespace, folder: str) -> list[float]:
    """Train and return the memory after each epoch."""
    memory = MemoryLog()
    data = RolloutDataModule(
        ClosedWebTask(hops=[3]),
        lambda model: VLLMEngine(model, 1024, kv_cache_gib=0.03, num_threads=1),
        group_size=4,
        questions_per_epoch=sizes.questions,
        num_steps=2,
        tokens_per_forward=8192,
        limits=AgentLimits(max_turns=7, max_response_tokens=64, max_trajectory_tokens=800),
        answer_format=AnswerTags(instruction=""),  # the built-in model knows them
    )
    stages = [ToolCallSegmenter(), FrozenReferenceProber(), KStepTD(), TraceAnchor()]
    trainer = lightning.Trainer(
        default_root_dir=folder,
        max_epochs=sizes.epochs,
        accelerator="cpu",
        gradient_clip_val=1.0,
        reload_dataloaders_every_n_epochs=1,
        limit_val_batches=0,
        callbacks=[*stages, CreditAssigner(), memory],
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(
        TraceModule(optimizer=lambda p: torch.optim.AdamW(p, lr=5e-4, weight_decay=0.0)),
        datamodule=data,
    )
    return memory.mib


def main() -> None:
    """Train and print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--questions", type=int, default=4, help="of each epoch")
    sizes = parser.parse_args()
    warnings.filterwarnings("ignore")
    lightning.seed_everything(0)
    with tempfile.TemporaryDirectory() as folder:
        mib = train(sizes, folder)
    measured = mib[_WARM_EPOCHS - 1 :]
    slope, _ = statistics.linear_regression(range(len(measured)), measured)
    print(
        json.dumps(
            {
                "name": "memory_flat",
                "ratio": round(measured[-1] / measured[0], 4),
                "mib_per_epoch": round(slope, 3),
                "mib": [round(value, 1) for value in mib[_WARM_EPOCHS - 1 :: 5]],
                **vars(sizes),
            }
        )
    )


if __name__ == "__main__":
    main()
