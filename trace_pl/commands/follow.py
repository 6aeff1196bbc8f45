"""Follows settings through the signatures that take them, to the first that does not fit."""

from __future__ import annotations

import inspect
from argparse import Action
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from trace_pl.commands.classes import (
    Base,
    article,
    bases_of,
    closest,
    find_class,
    in_words,
    is_absent,
    is_own,
    known_classes,
    public_path,
)
from trace_pl.commands.settings import Keys, Source, nested, read_config
from trace_pl.commands.signatures import accepts, class_of, class_slots, has_inner, names_class
from trace_pl.errors import ConfigError, TraceError, one_line, with_place
from trace_pl.privates import hint_of

_SPEC = ("class_path", "init_args", "dict_kwargs")
_MOST_NAMES = 16
_ALIKE = 8


@dataclass
class _Chosen:
    """The class that a slot holds so far, and the settings that it was given."""

    kind: Any
    bases: list[Base]
    given: set[str] = field(default_factory=set)


class Follower:
    """Checks settings in their order, and remembers the classes that were chosen.

    Args:
        command: Name of what takes them, for messages.
    """

    def __init__(self, command: str) -> None:
        self.command = command
        self.source = Source({})
        self._chosen: dict[Keys, _Chosen] = {}
        self._seen: set[str] = set()

    def group(
        self, slots: dict[str, Action], within: Keys, keys: Keys, settings: dict[str, Any]
    ) -> None:
        """Check the settings of a parser, or of one of its groups.

        Args:
            slots: What the parser takes, by its dotted name.
            within: Names of the group in the parser.
            keys: Names of the group for the user.
            settings: What was given.

        Raises:
            ConfigError: for the first that does not fit.
        """
        prefix = "".join(f"{name}." for name in within)
        names = list(dict.fromkeys(
            slot.removeprefix(prefix).split(".")[0] for slot in slots if slot.startswith(prefix)
        ))  # fmt: skip
        for name, value in settings.items():
            first, dot, rest = str(name).removesuffix("+").partition(".")
            inner = nested([rest], value) if dot else value
            here = (*keys, first)
            if first not in names:
                raise self._unknown(here, self._owner(keys), names)
            if prefix + first in slots and not has_inner(slots, prefix + first):
                self.slot(slots[prefix + first], here, inner)
            elif isinstance(inner, dict):
                self.group(slots, (*within, first), here, inner)
            elif isinstance(inner, str) and Path(inner).is_file():
                self.group(slots, (*within, first), here, read_config(Path(inner)).settings)
            else:
                takes = [
                    slot.split(".")[-1] for slot in slots if slot.startswith(f"{prefix}{first}.")
                ]
                raise ConfigError(
                    f"Expected settings below `{'.'.join(here)}` {self.source.place(here)}, got "
                    f"{'null' if inner is None else repr(inner)}. It takes {_listed(takes)}."
                )

    def slot(self, action: Action, keys: Keys, value: Any) -> None:  # noqa: ANN401
        """Check what was given to one slot."""
        self._seen.add(".".join(keys))
        hint = hint_of(action)
        if hint is None or value is None:
            return
        bases = bases_of(hint)
        default = class_of(action.default, bases)
        if bases and isinstance(value, list):
            for number, each in enumerate(value):
                self._chosen.pop(keys, None)  # of the entry before
                if isinstance(each, dict | str):
                    self._class(bases, default, keys, (*keys, str(number)), each)
        elif bases and isinstance(value, dict):
            self._class(bases, default, keys, keys, value)
        elif bases and isinstance(value, str) and Path(value).is_file():
            self._class(bases, default, keys, keys, read_config(Path(value)).settings)
        elif bases and isinstance(value, str) and names_class(hint, value, self.source):
            self._class(bases, default, keys, keys, value)
        elif not accepts(hint, value, self.source):
            raise self._wrong(keys, in_words(hint), value)

    def require(self, slots: dict[str, Action]) -> None:
        """Check that parser and chosen classes were given what they cannot do without."""
        absent = [name for name, each in slots.items() if each.required]
        absent = [name for name in absent if name not in self._seen]
        if absent:
            is_run = "." in absent[0]
            hint = ", for example by `--config quickstart`" if is_run else ""
            raise ConfigError(f"Expected a value for {_listed(absent)}, got none. Give it{hint}.")
        for keys, chosen in self._chosen.items():
            slots = class_slots(chosen.kind, chosen.bases)
            missing = [name for name, each in slots.items() if each.required]
            missing = [name for name in missing if name not in chosen.given]
            if missing:
                settings = ", ".join(".".join((*keys, "init_args", name)) for name in missing)
                raise ConfigError(
                    f"Expected {_listed(missing)} for {public_path(chosen.kind)}, got none. "
                    f"Set {settings}."
                )

    def _class(
        self,
        bases: list[Base],
        default: Any,  # noqa: ANN401 - a class, or a function that makes one
        slot: Keys,
        keys: Keys,
        value: dict[str, Any] | str,
    ) -> None:
        spec: dict[str, Any] = {"class_path": value} if isinstance(value, str) else value
        before = self._chosen.get(slot)
        if "class_path" in spec:
            kind = self._find(spec["class_path"], bases, keys)
        else:
            kind = before.kind if before else default
        is_settings = not any(name in spec for name in _SPEC)
        if kind is None:
            raise self._no_class(keys, spec, bases)
        if not inspect.isclass(kind):
            return  # a function that makes one; the parser has said what there is to say
        slots = class_slots(kind, bases)
        unknown = [name for name in spec if name not in _SPEC]
        if unknown and not is_settings:
            raise ConfigError(
                f"Expected `class_path` and `init_args` at `{'.'.join(keys)}` "
                f"{self.source.place((*keys, unknown[0]))}, got `{unknown[0]}`. Settings of the "
                "class go below `init_args`."
            )
        given = spec if is_settings else spec.get("init_args") or {}
        kept = {name for name in before.given if name in slots} if before else set()
        self._chosen[slot] = _Chosen(kind, bases, kept | {name.split(".")[0] for name in given})
        where = keys if is_settings else (*keys, "init_args")
        names = [name for name in slots if "." not in name]
        for name in given:
            first = name.split(".")[0].removesuffix("+")
            if first not in {slot.split(".")[0] for slot in slots}:
                raise self._unknown((*where, first), public_path(kind), names)
        self.group(slots, (), where, given)

    def _find(self, path: Any, bases: list[Base], keys: Keys) -> Any:  # noqa: ANN401
        kinds = " or ".join(dict.fromkeys(base.kind.__name__ for base in bases))
        where = f"at `{'.'.join(keys)}` {self.source.place(keys)}"
        try:
            kind = find_class(str(path), bases)
        except Exception as error:  # the module may be the user's own, and do anything
            if is_absent(error):
                is_name = str(path).replace(".", "_").isidentifier()
                fault = ", which does not exist" if is_name else ""
            else:
                is_told = isinstance(error, ImportError | RuntimeError | TraceError)
                why = one_line(error) if is_told else with_place(error)
                fault = f", which cannot be imported ({why})"
        else:
            if any(base.takes(kind) or base.may_make(kind) for base in bases):
                return kind
            fault = f", which is no {kinds}"
        choices = known_classes(bases)
        if any(is_own(base.kind.__module__) for base in bases):
            choices = [choice for choice in choices if is_own(choice)]
        near = closest(str(path), choices)
        hint = f" Did you mean `{near}`?" if near else ""
        there_are = f" There are: {_listed(choices, str(path))}." if choices else ""
        raise ConfigError(
            f"Expected {article(kinds)} {where}, got '{path}'{fault}.{hint}{there_are}"
        )

    def _no_class(self, keys: Keys, spec: dict[str, Any], bases: list[Base]) -> ConfigError:
        first = next(iter(spec), "nothing")
        hint = " Did you mean `class_path`?" if "class" in first else ""
        return ConfigError(
            f"Expected `class_path` at `{'.'.join(keys)}` {self.source.place(keys)}, got "
            f"'{first}'.{hint} There are: {_listed(known_classes(bases))}."
        )

    def _unknown(self, keys: Keys, owner: str, names: list[str]) -> ConfigError:
        near = closest(keys[-1], names)
        hint = f" Did you mean `{near}`?" if near else ""
        return ConfigError(
            f"Expected a setting of {owner} {self.source.place(keys)}, got `{'.'.join(keys)}`."
            f"{hint} It takes {_listed(names, keys[-1])}."
        )

    def _wrong(self, keys: Keys, words: str, value: Any) -> ConfigError:  # noqa: ANN401
        return ConfigError(
            f"Expected {words} for `{'.'.join(keys)}` {self.source.place(keys)}, got {value!r}."
        )

    def _owner(self, keys: Keys) -> str:
        if not keys:
            return f"`{self.command}`"
        return f"`{'.'.join(keys)}`"


def _listed(names: Sequence[str], meant: str = "") -> str:
    """Return the names as one list, in their order; of many only those that look most alike."""
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)

    def likeness(name: str) -> float:
        return SequenceMatcher(None, meant.rsplit(".", 1)[-1], name.rsplit(".", 1)[-1]).ratio()

    shown = sorted(names, key=likeness, reverse=True)[:_ALIKE]
    return f"{', '.join(shown)} and {len(names) - _ALIKE} more"
