"""What is wrong with the settings of a command, in one line, once its parser has refused them.

The parser judges; this only says why: it follows what was given, file by file and argument by
argument, and stops at the first setting that does not fit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from trace_pl.commands.follow import Follower
from trace_pl.commands.parser import OneLineErrors, Refused, command_name
from trace_pl.commands.settings import read_arguments
from trace_pl.commands.signatures import slots_of
from trace_pl.errors import ConfigError
from trace_pl.privates import subcommands_of

_FLAGS = ("-h", "--help", "--print_config")


class ExplainedParser(OneLineErrors, ArgumentParser):
    """A parser of jsonargparse whose line of error names file, key and what was meant."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any
    ) -> Namespace:
        """Parse arguments.

        Raises:
            ConfigError: if they are refused.
        """
        try:
            return super().parse_args(args, *more, **kwargs)
        except Refused as refused:
            fault = explain(self, sys.argv[1:] if args is None else args)
            raise ConfigError(fault or str(refused)) from refused


def explain(parser: ArgumentParser, arguments: Sequence[str]) -> str | None:
    """Return the first fault of the arguments, None if there is none to be found.

    Args:
        parser: What refused them.
        arguments: What it was given.
    """
    rest = list(arguments)
    commands = subcommands_of(parser)
    if rest and rest[0] in commands:
        parser = commands[rest.pop(0)]
    slots = slots_of(parser)
    positionals = [name for name, action in slots.items() if not action.option_strings]
    follower = Follower(command_name(parser.prog))
    try:
        for source in read_arguments(rest, _FLAGS, positionals):
            follower.source = source
            follower.group(slots, (), (), source.settings)
        follower.require(slots)
    except ConfigError as error:
        return str(error)
    except Exception:  # a fault of the search: what the parser said is better than a traceback
        return None
    return None
