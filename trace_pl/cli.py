"""The command line: `trace-pl fit | validate | test | predict`, and a few commands beside it."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from trace_pl.checkpoint import CheckpointFiles
from trace_pl.credit.assigner import CreditAssigner
from trace_pl.credit.stages import Anchor, Backup, Prober, Segmenter
from trace_pl.datamodule import RolloutDataModule
from trace_pl.distributed.strategy import ShardedStrategy
from trace_pl.errors import ConfigError, TraceError
from trace_pl.module import TraceModule
from trace_pl.resume import RunRecord, prepare
from trace_pl.run_folder import claim_folders, folder_loggers

SLOTS: dict[str, tuple[type, str]] = {
    "credit.segmenter": (Segmenter, "callbacks.ToolCallSegmenter"),
    "credit.prober": (Prober, "callbacks.FrozenReferenceProber"),
    "credit.backup": (Backup, "callbacks.KStepTD"),
    "credit.anchor": (Anchor, "callbacks.TraceAnchor"),
}
"""Slot -> (stage, default class); swapped by key: `--credit.anchor callbacks.OutcomeOnly`."""


COMMANDS = {
    "make-base": "trace_pl.data.closed_web.make_base",
    "export": "trace_pl.export",
    "plan": "trace_pl.plan.command",
}
"""Commands beside Lightning's -> the module whose ``command`` is given the arguments."""


class TraceCLI(LightningCLI):
    """LightningCLI with the four credit slots and run folders that resume where they stopped."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add one named slot per credit stage; what must agree is written once."""
        for name, (stage, default) in SLOTS.items():
            parser.add_lightning_class_args(stage, name, subclass_mode=True, required=False)
            parser.set_defaults({name: {"class_path": default}})
        parser.add_lightning_class_args(CreditAssigner, "credit.assigner")
        parser.add_argument(
            "--resume_changes",
            type=str | None,
            default=None,
            help="Settings that may differ from those of --ckpt_path, by name: "
            "credit.anchor,model.optimizer",
        )
        parser.link_arguments("model.model_name", "data.model_name")

    def _parse_ckpt_path(self) -> None:
        """Leave the checkpoint unread: it holds no settings of the module, and is checked later."""

    def instantiate_classes(self) -> None:
        """Build module, data, stages and Trainer from the config.

        Raises:
            TraceError: what a class said of its settings, which the parser would bury in a list of
                the types that it tried.
        """
        try:
            super().instantiate_classes()
        except ValueError as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, TraceError):
                    raise cause from None
                cause = cause.__cause__
            raise

    def after_instantiate_classes(self) -> None:
        """Check the run folder and find the checkpoint to start from, before anything heavy."""
        if self.subcommand is None:
            return
        arguments = self.config_init[self.subcommand]
        asked, named = arguments["ckpt_path"], arguments["resume_changes"]
        if named and not asked:
            raise ConfigError(
                f"Expected --ckpt_path beside --resume_changes, got '{named}' alone. A new run "
                "needs no leave to differ."
            )
        record = next((c for c in self.trainer.callbacks if isinstance(c, RunRecord)), None)  # type: ignore[attr-defined]
        arguments["ckpt_path"] = prepare(
            self.trainer, self.model, self.datamodule, record, self.subcommand, asked
        )

    def before_fit(self) -> None:
        """Check data, tools, model and engine, and only then take a run folder."""
        if isinstance(self.trainer.strategy, ShardedStrategy):
            self.trainer.strategy.mesh_shape()
        if torch.cuda.is_available() and self.subcommand == "fit":
            from trace_pl.plan.require import require_fit  # the plan reads configs with this file

            memory = torch.cuda.get_device_properties(0).total_memory
            require_fit(self.config["fit"], memory / 2**30, self.trainer.world_size)
        num_ranks = self.trainer.world_size
        self.datamodule.open(str(self.subcommand), num_ranks, starts_engine=num_ranks == 1)
        if self.trainer.is_global_zero:
            claim_folders(folder_loggers(self.trainer), str(self.subcommand))

    before_validate = before_fit
    before_test = before_fit
    before_predict = before_fit

    def instantiate_trainer(self, **kwargs: Any) -> lightning.Trainer:
        """Build the Trainer; rollouts are collected anew for each epoch."""
        self.trainer_defaults.setdefault("reload_dataloaders_every_n_epochs", 1)
        plugins = self._get(self.config_init, "trainer.plugins") or []
        kwargs.setdefault("plugins", [*plugins, CheckpointFiles()])
        named = self._get(self.config_init, "resume_changes") or ""
        self.save_config_kwargs = {"named": named.replace(" ", "").split(",")}
        return super().instantiate_trainer(**kwargs)


_EXPECTED_WARNINGS = (
    # The in-process engine opens a process group of one; all our logging syncs across ranks.
    r"It is recommended to use `self\.log\(",
    # The sized iterable keeps Lightning from prefetching a batch of an older policy.
    r"Your `IterableDataset` has `__len__` defined",
    # Minibatches move themselves, evaluation batches stay on the CPU.
    r"You have overridden `transfer_batch_to_device`",
    # A rollout phase is generated in this process; loader workers could not reach the engine.
    r"The '\w+_dataloader' does not have many workers",
    # A resumed run goes on in its folder, an evaluation in another than the checkpoint's.
    r"Checkpoint directory .* exists and is not empty",
    r"The dirpath has changed from",
    # Lightning's own calls of newer torch and jsonargparse.
    r".*isinstance\(treespec, LeafSpec\)",
    r"(?s).*``ArgumentParser\.add_instantiator`` was deprecated",
)


def main() -> int:
    """Run the command line; errors of trace_pl become one line and exit code 2."""
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    try:
        if sys.argv[1:2] and sys.argv[1] in COMMANDS:
            module = importlib.import_module(COMMANDS[sys.argv[1]])
            return int(module.command(sys.argv[2:]) or 0)
        TraceCLI(
            TraceModule,
            RolloutDataModule,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            save_config_callback=RunRecord,
            parser_kwargs={
                "description": "TRACE: turn-level credit for tool-using agents. "
                "`trace-pl plan` says whether a run fits, `trace-pl export` writes a checkpoint "
                "as a Hugging Face folder, `trace-pl make-base` trains the built-in tiny model."
            },
        )
    except TraceError as error:
        print(f"trace-pl: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
