"""What a slot of the config can take, found from its type and said in words."""

from __future__ import annotations

import collections.abc
import importlib
import inspect
import pkgutil
import re
import sys
import traceback
import types
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from trace_pl.commands.configs import shipped_folder
from trace_pl.privates import implements_protocol, is_protocol

_OWN = ("trace_pl", "callbacks")
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    types.NoneType: "null",
    Path: "a path",
    dict: "a mapping",
    list: "a list",
    type: "a class",
    tuple: "a list",
}
_LISTS = (list, tuple, set, collections.abc.Iterable, collections.abc.Sequence)


@dataclass(frozen=True)
class Base:
    """A type whose subclasses, or implementers, a slot takes."""

    kind: type
    num_positional: int = 0
    """Arguments that the program gives and the config does not, such as an optimizer's params."""

    @property
    def is_protocol(self) -> bool:
        """Whether anything with the right methods will do."""
        return bool(is_protocol(self.kind))

    def takes(self, candidate: Any) -> bool:  # noqa: ANN401 - whatever a module holds
        """Whether this slot can hold instances of a class, or a function that is a protocol."""
        if self.is_protocol:
            return not is_protocol(candidate) and bool(implements_protocol(candidate, self.kind))
        return inspect.isclass(candidate) and issubclass(candidate, self.kind)

    def may_make(self, candidate: Any) -> bool:  # noqa: ANN401 - whatever a module holds
        """Whether this may be a function that returns what the slot takes."""
        if inspect.isclass(candidate) or not callable(candidate):
            return False
        if not self.is_protocol:
            return True
        try:
            return self.takes(get_type_hints(candidate).get("return"))
        except (NameError, TypeError):  # of a name that is known to type checkers only
            return False

    @property
    def is_class(self) -> bool:
        """Whether the base itself can be made, as a dataclass of settings can."""
        return not (inspect.isabstract(self.kind) or self.is_protocol)


def bases_of(hint: Any) -> list[Base]:  # noqa: ANN401 - a type hint
    """Return the classes that a type hint names, those of texts and numbers apart."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return [base for arg in args for base in bases_of(arg)]
    if origin in _LISTS:
        return bases_of(args[0]) if args else []
    if origin is collections.abc.Callable and args:
        given = len(args[0]) if isinstance(args[0], list) else 0
        return [Base(base.kind, given) for base in bases_of(args[1])]
    plain = (*_WORDS, Enum)
    if not inspect.isclass(hint) or issubclass(hint, plain) or hint.__module__ in _PLAIN_MODULES:
        return []
    return [Base(hint)]


_PLAIN_MODULES = ("builtins", "datetime", "pathlib", "typing", "torch")


def in_words(hint: Any) -> str:  # noqa: ANN401 - a type hint
    """Return what a type hint takes, for example "a whole number or null"."""
    parts = list(dict.fromkeys(_parts(hint)))
    literals = [part[1:] for part in parts if part.startswith("=")]
    words = [part for part in parts if not part.startswith("=")]
    if literals:
        words.insert(0, f"one of {', '.join(literals)}")
    if "null" in words:  # last, where it reads well
        words = [word for word in words if word != "null"] + ["null"]
    return " or ".join(words)


def known_classes(bases: list[Base]) -> list[str]:
    """Return the import paths of the classes that a slot can hold, the project's own first."""
    _import_own()
    found: set[type] = set()
    for base in bases:
        is_alone = is_protocol(base.kind) or not base.kind.__subclasses__()
        found |= {base.kind} if is_alone and base.is_class else set()
        found |= set(_subclasses(base.kind))
    paths = {public_path(each) for each in found if _is_public(each)}
    return sorted(paths, key=lambda path: (not is_own(path), path))


def is_own(path: str) -> bool:
    """Whether a class is one of this project."""
    return path.split(".")[0] in _OWN


def article(word: str) -> str:
    """Return "a Backup" or "an Anchor"."""
    return f"{'an' if word[0] in 'AEIOUaeiou' else 'a'} {word}"


def find_class(path: str, bases: list[Base]) -> Any:  # noqa: ANN401 - a class, or a function
    """Return what an import path, or the bare name of a known class, stands for.

    Raises:
        Exception: if there is no such thing, see :func:`is_absent`, or its module fails.
    """
    if "." not in path:
        named = [each for each in known_classes(bases) if each.rsplit(".", 1)[-1] == path]
        if len(named) != 1:
            raise ValueError(path)
        path = named[0]
    return pkgutil.resolve_name(path)


def is_absent(error: Exception) -> bool:
    """Whether :func:`find_class` found nothing; the same kinds may come out of a user's module."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_ours = frame.f_globals.get("__name__") in (__name__, pkgutil.__name__)
    return is_ours and isinstance(error, AttributeError | ValueError)


def closest(name: str, names: list[str]) -> str | None:
    """Return the name that was probably meant, by its last part."""
    lasts = {each.rsplit(".", 1)[-1]: each for each in reversed(names)}
    found = get_close_matches(name.rsplit(".", 1)[-1], lasts, n=1)
    return lasts[found[0]] if found else None


def public_path(kind: type) -> str:
    """Return the shortest path by which a class can be imported."""
    parts = kind.__module__.split(".")
    for length in range(1, len(parts)):
        package = ".".join(parts[:length])
        if getattr(sys.modules.get(package), kind.__name__, None) is kind:
            return f"{package}.{kind.__name__}"
    return f"{kind.__module__}.{kind.__name__}"


def _parts(hint: Any) -> Iterator[str]:  # noqa: ANN401 - a type hint
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for arg in args:
            yield from _parts(arg)
    elif origin is Literal:
        yield from (f"={arg}" for arg in args)
    elif origin in _LISTS:
        yield _list_in_words(args, is_fixed=origin is tuple and Ellipsis not in args)
    elif origin is collections.abc.Callable:
        yield from ("a function",) if args[1] is Any else _parts(args[1])
    elif inspect.isclass(hint) and issubclass(hint, Enum):
        yield from (f"={name}" for name in hint.__members__)
    else:
        name = getattr(hint, "__name__", str(hint))
        yield _WORDS.get(origin or hint, article(name))


def _list_in_words(args: tuple[Any, ...], is_fixed: bool) -> str:
    if not args:
        return "a list"
    inner = in_words(args[0])
    if is_fixed:
        return f"a list of {len(args)} ({inner})"
    return f"a list ({inner})" if " or " in inner else f"a list of {inner.split(' ', 1)[-1]}s"


def _subclasses(kind: type) -> Iterator[type]:
    children: list[type] = kind.__subclasses__()
    for each in children:
        yield each
        yield from _subclasses(each)


def _is_public(kind: type) -> bool:
    """Whether a class can be named in a config; those of others only if they offer it."""
    path = public_path(kind)
    module = sys.modules.get(path.rpartition(".")[0])
    is_there = getattr(module, kind.__name__, None) is kind  # a dataclass with slots is made twice
    is_shown = is_own(path) or kind.__name__ in getattr(module, "__all__", ())
    is_hidden = kind.__name__.startswith("_") or inspect.isabstract(kind)
    return is_there and is_shown and not is_hidden


def _import_own() -> None:
    """Import what the shipped configs name, so that all choices of a slot are known."""
    names = {"callbacks"}
    for path in shipped_folder().rglob("*.yaml"):
        found = re.findall(r"class_path: ([\w.]+)\.\w+", path.read_text(encoding="utf-8"))
        names |= {name for name in found if name.split(".")[0] in _OWN}
    for name in names:
        with suppress(ImportError):  # a package of an extra that is not installed
            importlib.import_module(name)
