"""What `trace-pl plan` takes: its own settings, and those of the run."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from trace_pl.commands.parser import PlainParser
from trace_pl.commands.plan.inputs import Assumptions, Device


def split_arguments(arguments: list[str]) -> tuple[Assumptions, Device, list[str]]:
    """Return the plan's own settings, and the arguments that are those of `trace-pl fit`.

    Raises:
        ConfigError: if one of the plan's own is no positive number.
    """
    own, rest = _parser().parse_known_args(arguments)
    values = {name: value for name, value in vars(own).items() if value is not None}
    assumptions = Assumptions(**_pick(Assumptions, values))
    return assumptions, Device(**_pick(Device, values)), rest


def _parser() -> PlainParser:
    parser = PlainParser(
        "trace-pl plan",
        description="Memory, arithmetic and seconds of a run, from its config alone. Takes every "
        "argument of `trace-pl fit` beside these; docs/scale.md says what is assumed.",
        allow_abbrev=False,
    )
    for number, settings in ((int, Assumptions), (float, Device)):
        for each in fields(settings):
            default = "of the config" if each.default is None else each.default
            parser.add_argument(
                _flag(each.name), type=_positive(number), help=f"default: {default}"
            )
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
