"""What `trace-pl plan` does: parse the config of a run, plan it, print the plan."""

from __future__ import annotations

from jsonargparse import Namespace
from lightning import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from trace_pl.commands.cli import TraceCLI
from trace_pl.commands.plan.arguments import split_arguments
from trace_pl.commands.plan.from_config import run_from_config
from trace_pl.commands.plan.inputs import Assumptions, Device, PlannedRun
from trace_pl.commands.plan.remedies import fits
from trace_pl.commands.plan.report import report
from trace_pl.training.datamodule import RolloutDataModule
from trace_pl.training.module import TraceModule


class ParsedCLI(TraceCLI):
    """Parses what `trace-pl fit` takes, and builds and runs nothing.

    Args:
        arguments: Those of `trace-pl fit`.
    """

    def __init__(self, arguments: list[str]) -> None:
        super().__init__(
            TraceModule,
            RolloutDataModule,
            run=False,
            args=arguments,
            parser_kwargs={"prog": "trace-pl fit"},
            auto_configure_optimizers=False,
            save_config_callback=None,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the credit slots, and what Lightning takes for a run beside its classes."""
        super().add_arguments_to_parser(parser)
        parser.add_method_arguments(Trainer, "fit", skip=self.subcommands()["fit"])

    def instantiate_classes(self) -> None:
        """Build nothing."""


def parse_config(arguments: list[str]) -> Namespace:
    """Return the config of `trace-pl fit ARGUMENTS`."""
    config: Namespace = ParsedCLI([*arguments, "--seed_everything=false"]).config
    return config


def make_run(arguments: list[str]) -> PlannedRun:
    """Return the run that `trace-pl plan ARGUMENTS` plans.

    Raises:
        ConfigError: if the config cannot be planned.
    """
    assumptions, device, rest = split_arguments(arguments)
    return run_from_config(parse_config(rest), assumptions, device)


def plan(assumptions: Assumptions, device: Device, arguments: list[str]) -> int:
    """Print the plan of `trace-pl fit ARGUMENTS`; return 1 if the run does not fit."""
    run = run_from_config(parse_config(arguments), assumptions, device)
    print(report(run))
    return 0 if fits(run) else 1
