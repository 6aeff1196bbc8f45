"""The command line: `trace-pl fit | validate | test | predict`, from config to Trainer."""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from trace_pl.commands.classes import is_own
from trace_pl.commands.configs import config_files, with_config_paths
from trace_pl.commands.explain import ExplainedParser, explain
from trace_pl.commands.parser import core
from trace_pl.commands.settings import read_config
from trace_pl.credit.stages import Anchor, Backup, Prober, Segmenter
from trace_pl.distributed.strategy import ShardedStrategy
from trace_pl.errors import ConfigError, TraceError, with_place
from trace_pl.models.checkpoint import CheckpointFiles
from trace_pl.training.accelerator import require_usable_gpus
from trace_pl.training.credit_assigner import CreditAssigner
from trace_pl.training.datamodule import RolloutDataModule
from trace_pl.training.module import TraceModule
from trace_pl.training.resume import RunRecord, prepare
from trace_pl.training.run_folder import claim_folders, folder_loggers
from trace_pl.training.trainer_checks import check_trainer, require_first_devices

SLOTS: dict[str, tuple[type, str]] = {
    "credit.segmenter": (Segmenter, "callbacks.ToolCallSegmenter"),
    "credit.prober": (Prober, "callbacks.FrozenReferenceProber"),
    "credit.backup": (Backup, "callbacks.KStepTD"),
    "credit.anchor": (Anchor, "callbacks.TraceAnchor"),
}
"""Slot -> (stage, default class); swapped by key: `--credit.anchor callbacks.OutcomeOnly`."""


_MISFIT = "Expected settings that fit this machine and each other"
_BUGS = (AssertionError, AttributeError, LookupError, NameError)
"""What a class raises by mistake: its text alone would tell nobody where to look."""


class TraceParser(ExplainedParser, LightningArgumentParser):
    """Lightning's parser with one line of error."""


class TraceCLI(LightningCLI):
    """LightningCLI with the four credit slots and run folders that resume where they stopped."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own = {"parser_class": TraceParser, "parser_kwargs": {"prog": "trace-pl"}}
        given = kwargs.get("args")
        self._asked = (given if isinstance(given, list) else sys.argv[1:])[:1]
        super().__init__(*args, **{**own, **kwargs})

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the command that was asked for: to make a parser takes longer than to use it."""
        known = super().subcommands()
        return {name: skipped for name, skipped in known.items() if [name] == self._asked} or known

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the command line; the configs that are shipped are known by their names."""
        self.arguments: list[str] = []
        if args is not None and not isinstance(args, list):
            super().parse_arguments(parser, args)
            return
        self.arguments = with_config_paths(sys.argv[1:] if args is None else args)
        for config in config_files(self.arguments):
            read_config(config)
        self.config = parser.parse_args(self.arguments)

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
        # Rollouts are collected anew for each epoch.
        parser.set_defaults({"trainer.reload_dataloaders_every_n_epochs": 1})
        parser.link_arguments("model.model_name", "data.model_name")

    def _parse_ckpt_path(self) -> None:
        """Leave the checkpoint unread: it holds no settings of the module, and is checked later."""

    def before_instantiate_classes(self) -> None:
        """Check the Trainer's settings, and that no GPU is passed by."""
        if self.subcommand is not None:
            trainer = self.config[self.subcommand]["trainer"]
            check_trainer(trainer, self.subcommand)
            require_usable_gpus(str(trainer["accelerator"]))

    def instantiate_classes(self) -> None:
        """Build module, data, stages and Trainer from the config.

        Raises:
            TraceError: what a class said of its settings, on one line.
        """
        try:
            super().instantiate_classes()
        except Exception as error:  # whatever a constructor of any package raises for a setting
            root: BaseException = error
            while not isinstance(root, TraceError) and root.__cause__ is not None:
                root = root.__cause__  # the parser buries it in a list of the types that it tried
            if isinstance(root, TraceError):
                raise root from None
            if isinstance(root, _BUGS) or not str(error):
                raise ConfigError(f"{_MISFIT}, got {with_place(root)}.") from error
            fault = explain(self.parser, self.arguments)
            raise ConfigError(fault or f"{_MISFIT}, got: {core(str(error))}") from error

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
        require_first_devices(self.trainer.device_ids)
        if isinstance(self.trainer.strategy, ShardedStrategy):
            self.trainer.strategy.mesh_shape()
            self.trainer.strategy.wait_for(self.datamodule.agent.limits.slowest_s)
        if torch.cuda.is_available() and self.subcommand == "fit":
            from trace_pl.commands.plan.require import (
                require_fit,  # the plan reads configs with this file
            )

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
        """Build the Trainer, which reads and writes checkpoints in our way."""
        config = self.config_init[self.subcommand] if self.subcommand else self.config_init
        asked = config["trainer"]
        kwargs.setdefault("plugins", [*_listed(asked["plugins"]), CheckpointFiles()])
        callbacks = newest(_listed(asked["callbacks"]))
        if asked["enable_checkpointing"] is False:  # Lightning refuses it beside the callback
            callbacks = [c for c in callbacks if not isinstance(c, ModelCheckpoint)]
        kwargs.setdefault("callbacks", callbacks)
        named = config["resume_changes"] or ""
        self.save_config_kwargs = {"named": named.replace(" ", "").split(",")}
        return super().instantiate_trainer(**kwargs)


def _listed(value: Any) -> list[Any]:  # noqa: ANN401  (none, one, or a list of them)
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def newest(callbacks: list[Callback]) -> list[Callback]:
    """Return callbacks without those of the project that are given again, with other settings.

    So `--trainer.callbacks+=callbacks.HealthMonitor --trainer.callbacks.patience 5` changes the
    one of a config. Classes of others may be meant to be there twice.
    """
    last = {type(each): each for each in callbacks}
    return [c for c in callbacks if last[type(c)] is c or not is_own(type(c).__module__)]


def run_lightning(arguments: list[str]) -> None:
    """Run `trace-pl fit`, `validate`, `test` or `predict`.

    Raises:
        ConfigError: for what Lightning finds only then to be set wrong.
    """
    try:
        TraceCLI(
            TraceModule,
            RolloutDataModule,
            args=arguments,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            save_config_callback=RunRecord,
        )
    except MisconfigurationException as error:
        raise ConfigError(f"{_MISFIT}, got: {core(str(error))}") from error
