"""Runs Trainers over given rollouts inside a process group.

A job is a dict of a name, a model folder, a strategy and what else ``run`` takes; the output holds
what rank 0 found, by name. Without a group the same jobs run in one process.
"""

import json
import os
from pathlib import Path

import lightning
import torch
from builders import group
from lightning.pytorch.callbacks import Callback
from processes import leave
from random_models import VOCAB
from torch import distributed
from torch.utils.data import DataLoader

from trace_pl.credit.pipeline import CreditReport
from trace_pl.distributed.leader import to_all
from trace_pl.distributed.strategy import ShardedStrategy
from trace_pl.models import head
from trace_pl.models.adapters import LoRA
from trace_pl.probes import Branch, ProbeRequest
from trace_pl.scoring import BranchedScorer
from trace_pl.training.buffer import RolloutBuffer
from trace_pl.training.credit_metrics import experience_metrics
from trace_pl.training.module import TraceModule
from trace_pl.training.row_plan import BatchPlan
from trace_pl.types import ProbeValues, TokenAdvantages

# Three groups: of four ranks the last samples nothing, of two the first samples more.
GROUPS = [group([0, 1, 0, 1, 1], 0), group([1, 0], 1), group([0, 1, 1], 2)]


class SharedExperience(lightning.LightningDataModule):
    """The same rollouts every epoch, dealt to the ranks group by group."""

    def __init__(self, plan):
        super().__init__()
        self.plan = plan

    def train_dataloader(self):
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        mine = range(rank, len(GROUPS), world_size)
        self.buffer = RolloutBuffer([GROUPS[i] for i in mine], self.plan, positions=mine)
        self.buffer.share()
        self.buffer.assign([advantages(rollout) for rollout in self.buffer.rollouts])
        self.trainer.accumulate_grad_batches = self.buffer.micro_batches
        return DataLoader(self.buffer, batch_size=None)

    def experience(self):
        """Return the groups of this rank and what a credit pipeline could say of them."""
        rollouts = self.buffer.rollouts
        values = [
            ProbeValues(r.id, *torch.rand(2, r.num_turns + 1, generator=seeded(r)))
            for r in rollouts
        ]
        credit = [advantages(rollout) for rollout in rollouts]
        return self.buffer.groups, CreditReport([], values, [], credit)


def advantages(rollout):
    values = torch.randn(len(rollout.token_ids), generator=seeded(rollout)) * rollout.loss_mask
    return TokenAdvantages(rollout.id, values, 0.0, torch.zeros(rollout.num_turns))


def seeded(rollout):
    return torch.Generator().manual_seed(rollout.index)


class Watch(Callback):
    """Keeps what every update said, and at the end what the reference says."""

    def __init__(self):
        # On-policy the loss is the mean advantage, whatever the weights; these two tell.
        self.losses = []
        self.norms = []
        self.scores = []
        self.pushed = {}
        self.metrics = {}
        self.exchanges = 0
        self.num_rows = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.num_rows.append(len(batch.rollout_ids))

    def on_train_start(self, trainer, pl_module):
        gather = trainer.strategy.all_gather

        def counted(states):
            self.exchanges += 1
            return gather(states)

        trainer.strategy.all_gather = counted

    def on_train_epoch_start(self, trainer, pl_module):
        experience_metrics(*trainer.datamodule.experience()).log(pl_module)

    def on_train_epoch_end(self, trainer, pl_module):
        self.losses.append(float(trainer.callback_metrics["loss/surprisal"]))
        self.norms.append(float(trainer.callback_metrics["loss/gradient_norm"]))

    def on_train_end(self, trainer, pl_module):
        mine = GROUPS[trainer.global_rank :: trainer.world_size]
        requests = [
            ProbeRequest(r.id, r.token_ids, (r.prompt_length, len(r.token_ids)), BRANCHES)
            for each in mine
            for r in each.rollouts
        ]
        with pl_module.reading_reference() as reference:
            scores = BranchedScorer(reference, token_budget=40).score(requests)
        self.scores = [score.tolist() for score in scores]
        found = trainer.callback_metrics
        self.metrics = {tag: float(v) for tag, v in found.items() if not tag.startswith("time/")}
        self.pushed = {name: float(t.abs().sum()) for name, t in pl_module.policy_tensors()}


BRANCHES = (Branch((5, 6), (7, 8, 9)), Branch((5, 6), (11,)))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3)


def run(
    model, strategy="auto", epochs=3, resume=None, save=None, plan=None, adapter=None, **settings
):
    """Train and return losses, scores and where the weights were saved."""
    watch = Watch()
    module = TraceModule(
        model, optimizer=adamw, adapter=LoRA(**adapter) if adapter else None, **settings
    )
    if isinstance(strategy, dict):
        strategy = ShardedStrategy(**{"compute_dtype": "float32", "timeout_s": 300, **strategy})
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        strategy=strategy,
        callbacks=[watch],
        gradient_clip_val=1.0,
        reload_dataloaders_every_n_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = SharedExperience(BatchPlan(**{"tokens_per_forward": 60, **(plan or {})}))
    trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
    if save:
        trainer.save_checkpoint(save)
    num_rows = to_all(watch.num_rows)
    if trainer.is_global_zero:
        return {
            "num_rows": num_rows,
            "losses": watch.losses,
            "norms": watch.norms,
            "scores": watch.scores,
            "pushed": watch.pushed,
            "metrics": watch.metrics,
            "exchanges": watch.exchanges,
            "steps": trainer.global_step,
        }
    return None


def main(jobs, output):
    """Run the jobs of a file and write what the first rank found to another.

    The vocabulary head runs on two tokens at a time, where one process alone reads all at once.
    """
    head.most_logit_bytes = lambda device_type: 2 * 4 * VOCAB
    found = {name: run(**job) for name, job in json.loads(Path(jobs).read_text()).items()}
    if int(os.environ.get("RANK", 0)) == 0:
        Path(output).write_text(json.dumps(found))
    if distributed.is_initialized():
        leave()
