"""`trace-pl plan`: will a run fit, and how long does it take? Asked before anything is loaded."""

from __future__ import annotations

import argparse
import warnings
from dataclasses import fields
from typing import Any

from jsonargparse import Namespace

from trace_pl.cli import TraceCLI
from trace_pl.datamodule import RolloutDataModule
from trace_pl.module import TraceModule
from trace_pl.plan.from_config import Assumptions, run_from_config
from trace_pl.plan.inputs import Device, Run
from trace_pl.plan.remedies import fits
from trace_pl.plan.report import report


class ParsedCLI(TraceCLI):
    """Parses what `trace-pl fit` takes and stops there."""

    def __init__(self, arguments: list[str]) -> None:
        super().__init__(
            TraceModule,
            RolloutDataModule,
            args=["fit", *arguments],
            auto_configure_optimizers=False,
            save_config_callback=None,
        )

    def before_instantiate_classes(self) -> None:
        """Leave run folders alone."""

    def instantiate_classes(self) -> None:
        """Build nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


def parse_config(arguments: list[str]) -> Namespace:
    """Return the config of `trace-pl fit ARGUMENTS`."""
    with warnings.catch_warnings():
        # Lightning's word that arguments were given twice; it reads only these.
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        config: Namespace = ParsedCLI([*arguments, "--seed_everything=false"]).config["fit"]
    return config


def make_run(arguments: list[str]) -> Run:
    """Return the run that `trace-pl plan ARGUMENTS` plans.

    Raises:
        ConfigError: if the config can not be planned.
    """
    own, rest = _parser().parse_known_args(arguments)
    values = {name: value for name, value in vars(own).items() if value is not None}
    assumptions = Assumptions(**_pick(Assumptions, values))
    return run_from_config(parse_config(rest), assumptions, Device(**_pick(Device, values)))


def command(arguments: list[str]) -> int:
    """Run `trace-pl plan`: print the plan; 1 if the run does not fit."""
    run = make_run(arguments)
    print(report(run))
    return 0 if fits(run) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "trace-pl plan",
        description="Memory, arithmetic and seconds of a run, from its config alone. Takes every "
        "argument of `trace-pl fit` beside these; docs/scale.md says what is assumed.",
        allow_abbrev=False,
    )
    for each in fields(Assumptions):
        parser.add_argument(_flag(each.name), type=_positive(int), help=f"default: {each.default}")
    for each in fields(Device):
        parser.add_argument(_flag(each.name), type=_positive(float), help=f"default {each.default}")
    return parser


def _positive(kind: type) -> Any:  # noqa: ANN401  (argparse takes any callable)
    def convert(text: str) -> Any:  # noqa: ANN401
        value = kind(text)
        if value < 0 or (kind is float and value == 0):
            raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
        return value

    convert.__name__ = kind.__name__
    return convert


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _pick(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in values.items() if name in names}
