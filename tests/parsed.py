"""Configs as `trace-pl fit` parses them, by one parser: to make it takes longer than to parse."""

import warnings
from functools import cache
from pathlib import Path

from jsonargparse import Namespace

from trace_pl.commands.plan.planning import ParsedCLI

CONFIGS = Path(__file__).parents[1] / "configs"
RUNS = sorted(CONFIGS.glob("*.yaml"))


@cache
def parser():
    """Return the parser of `trace-pl fit`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        return ParsedCLI([f"--config={RUNS[0]}", "--seed_everything=false"]).parser


@cache
def parsed(*arguments: str) -> Namespace:
    """Return the config of `trace-pl fit ARGUMENTS`; whoever changes it takes a clone."""
    return parser().parse_args(list(arguments))
