"""A Trainer run on given rollouts, without an engine."""

import lightning
import torch
from builders import group
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from trace_pl.training.buffer import RolloutBuffer
from trace_pl.training.module import TraceModule
from trace_pl.training.row_plan import BatchPlan
from trace_pl.types import TokenAdvantages


class FixedExperience(lightning.LightningDataModule):
    """One epoch of given rollouts, with random advantages on all their sampled tokens."""

    def __init__(self, plan: BatchPlan, poison: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.buffer = RolloutBuffer([group([0, 1, 0, 1, 1], n) for n in range(2)], plan)
        self.buffer.assign(
            [
                TokenAdvantages(
                    r.id,
                    torch.randn(len(r.token_ids), generator=generator) * r.loss_mask + poison,
                    0.0,
                    torch.zeros(r.num_turns),
                )
                for r in self.buffer.rollouts
            ]
        )

    def train_dataloader(self):
        return DataLoader(self.buffer, batch_size=None)


class KeepGradient(Callback):
    gradient: torch.Tensor

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradient = torch.cat([p.grad.flatten() for p in pl_module.policy.parameters()])


class KeepBatches(Callback):
    def __init__(self):
        self.dtypes = set()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.dtypes.add(batch.advantages_BT.dtype)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def train(model_dir, plan=None, callbacks=(), epochs=1, data=None, model=None, **trainer_settings):
    data = data or FixedExperience(plan or BatchPlan())
    settings = {"optimizer": sgd, "max_bad_steps": 2, **(model or {})}
    module = TraceModule(str(model_dir), **settings)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        accumulate_grad_batches=data.buffer.micro_batches,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer_settings,
    )
    trainer.fit(module, datamodule=data)
    return module, trainer
