"""Parsers whose complaint is one line."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any, NoReturn

from trace_pl.errors import ConfigError

_FRAME = (
    "Parser key",
    "Problem with given class_path",
    "Expected a path but",
    "Does not validate",
    "Subtypes:",
    "Errors:",
    "Given value",
    "Subclass types expect",
    "Not a valid subclass",
    "a class path (str)",
    "a dict with",
)
"""How the lines of a parser's message begin that say nothing of the fault."""


class Refused(ConfigError):
    """What a parser said before it is known why."""


class OneLineErrors:
    """Put before a parser of argparse or jsonargparse, raises what it has to say as one line."""

    exit_on_error: bool
    prog: str

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the error.

        Raises:
            Refused: always, except inside another parser's attempt.
        """
        if not self.exit_on_error:  # the parser of a class, one of several attempts
            parent: Any = super()
            parent.error(message, ex)
        raise Refused(f"{core(message)} See `{command_name(self.prog)} --help`.") from ex


class PlainParser(OneLineErrors, ArgumentParser):
    """argparse with one line of error."""


def command_name(prog: str) -> str:
    """Return the name of a command without what its parser adds."""
    return prog.replace(" [options]", "")


def core(message: str) -> str:
    """Return the sentence of a parser's message that names the fault."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    told = [line for line in lines if line and not line.startswith(_FRAME)]
    best = [line for line in told if not line.startswith("Expected a <class")] or told
    text = (best[0] if best else " ".join(message.split()))[:300].rstrip(".!")
    return f"{text[:1].upper()}{text[1:]}."
