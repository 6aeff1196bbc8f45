"""The command line: `trace-pl fit | validate | test | predict`, and a few commands beside it."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from trace_pl.checkpoint import CheckpointFiles
from trace_pl.credit.assigner import CreditAssigner
from trace_pl.credit.stages import Anchor, Backup, Prober, Segmenter
from trace_pl.datamodule import RolloutDataModule
from trace_pl.distributed.strategy import ShardedStrategy
from trace_pl.errors import ConfigError, TraceError
from trace_pl.files import require_writable
from trace_pl.module import TraceModule

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
        parser.link_arguments("model.model_name", "data.model_name")

    def before_instantiate_classes(self) -> None:
        """Check the run folder and find the checkpoint to resume before anything heavy starts."""
        config = self.config[self.subcommand] if self.subcommand else self.config
        root = run_root(config)
        if root is None:
            return
        require_writable(root, "`trainer.logger.init_args.save_dir`")
        if config.get("ckpt_path") == "last":
            run, checkpoint = newest_run(root)
            config["ckpt_path"] = str(checkpoint)
            if self.subcommand == "fit":
                config["trainer"]["logger"]["init_args"]["version"] = run.name

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
            for logger in self.trainer.loggers:
                claim_version(logger)

    before_validate = before_fit
    before_test = before_fit
    before_predict = before_fit

    def instantiate_trainer(self, **kwargs: Any) -> lightning.Trainer:
        """Build the Trainer; rollouts are collected anew for each epoch."""
        self.trainer_defaults.setdefault("reload_dataloaders_every_n_epochs", 1)
        plugins = self._get(self.config_init, "trainer.plugins") or []
        kwargs.setdefault("plugins", [*plugins, CheckpointFiles()])
        return super().instantiate_trainer(**kwargs)


class SaveConfigBesideLogs(SaveConfigCallback):
    """Saves the resolved config in the run folder; a run without one leaves nothing behind."""

    def setup(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str
    ) -> None:
        """Save, if there is a logger and with it a run folder."""
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)


def run_root(config: Namespace) -> Path | None:
    """Return the folder that holds the versions of a run, None without such a logger."""
    logger = config["trainer"].get("logger")
    settings = getattr(logger, "init_args", None)
    if settings is None or "save_dir" not in settings:
        return None
    return Path(settings["save_dir"]) / (settings.get("name") or "")


def claim_version(logger: Logger) -> None:
    """Make the folder of a run, and count on where another run was faster to take the number."""
    if not isinstance(logger, TensorBoardLogger | CSVLogger) or not isinstance(logger.version, int):
        return  # a version that has a name was asked for
    while True:
        try:
            Path(logger.log_dir).mkdir(parents=True)
            return
        except FileExistsError:
            logger._version = logger.version + 1


def newest_run(root: Path) -> tuple[Path, Path]:
    """Return the newest run below ``root`` that has a last checkpoint, and that checkpoint.

    Raises:
        ConfigError: if there is none.
    """
    found = sorted(root.glob("*/checkpoints/last.ckpt"), key=lambda path: path.lstat().st_mtime)
    if not found:
        raise ConfigError(
            f"Expected a checkpoint '*/checkpoints/last.ckpt' below '{root}' to resume from, got "
            "none. Run once without --ckpt_path, or give the checkpoint's path."
        )
    return found[-1].parent.parent, found[-1]


_EXPECTED_WARNINGS = (
    # The in-process engine opens a process group of one; all our logging syncs across ranks.
    r"It is recommended to use `self\.log\(",
    # The sized iterable keeps Lightning from prefetching a batch of an older policy.
    r"Your `IterableDataset` has `__len__` defined",
    # Minibatches move themselves, evaluation batches stay on the CPU.
    r"You have overridden `transfer_batch_to_device`",
    # A rollout phase is generated in this process; loader workers could not reach the engine.
    r"The '\w+_dataloader' does not have many workers",
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
            save_config_callback=SaveConfigBesideLogs,
            save_config_kwargs={"overwrite": True},
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
