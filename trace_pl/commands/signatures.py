"""What constructors take from a config, as the parser sees them."""

from __future__ import annotations

import re
from argparse import Action, ArgumentError
from functools import cache
from typing import Any

from jsonargparse import ArgumentParser

from trace_pl.commands.classes import Base, bases_of, find_class, in_words, known_classes
from trace_pl.commands.settings import Source
from trace_pl.privates import actions_of


def slots_of(parser: ArgumentParser) -> dict[str, Action]:
    """Return what a parser takes, by dotted name."""
    return {
        action.dest: action
        for action in actions_of(parser)
        if action.dest not in ("help", "print_config") and not action.dest.endswith(".help")
    }


def class_slots(kind: type, bases: list[Base]) -> dict[str, Action]:
    """Return what the constructor of a class takes from a config."""
    return _constructor_slots(kind, max((base.num_positional for base in bases), default=0))


@cache
def _constructor_slots(kind: type, num_skipped: int) -> dict[str, Action]:
    parser = ArgumentParser(exit_on_error=False)
    skip: set[str | int] = {num_skipped} if num_skipped else set()
    parser.add_class_arguments(kind, fail_untyped=False, skip=skip)
    return slots_of(parser)


def has_inner(slots: dict[str, Action], name: str) -> bool:
    """Whether a name is that of a group."""
    return any(slot.startswith(f"{name}.") for slot in slots)


def class_of(default: Any, bases: list[Base]) -> Any:  # noqa: ANN401
    """Return the class of a slot's default."""
    path = default.get("class_path") if hasattr(default, "get") else None
    if path is not None:
        return find_class(path, bases)
    if any(base.takes(default) for base in bases):
        return default
    made = [base.kind for base in bases if base.is_class]
    return made[0] if len(made) == 1 else None


def names_class(hint: Any, value: str, source: Source) -> bool:  # noqa: ANN401
    """Whether a text is, or should be, a class rather than another value that a slot takes."""
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", value):
        return True
    if accepts(hint, value, source):
        return any(path.endswith(f".{value}") for path in known_classes(bases_of(hint)))
    return "number" not in in_words(hint)


def accepts(hint: Any, value: Any, source: Source) -> bool:  # noqa: ANN401
    """Whether a value has the type of a setting."""
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=hint)
    except ValueError:  # a type that the parser takes only as part of a signature
        return True
    try:
        if source.path is None and isinstance(value, str):
            parser.parse_args([f"--value={value}"])
        else:
            parser.parse_object({"value": value})
    except ArgumentError:
        return False
    return True
