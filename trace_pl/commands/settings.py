"""The settings that a user has given, file by file and argument by argument, and where each is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trace_pl.errors import ConfigError, one_line

Keys = tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """Settings of one place, as nested dicts; those of an argument are still text."""

    settings: dict[str, Any]
    path: Path | None = None
    """The file; None on the command line."""
    lines: dict[Keys, int] = field(default_factory=dict)

    def place(self, keys: Keys) -> str:
        """Return where a setting stands, as the middle of a sentence."""
        if self.path is None:
            return "on the command line"
        line = next(
            (self.lines[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in self.lines), 1
        )
        return f"in '{self.path}', line {line}"


def read_config(path: Path) -> Source:
    """Read a config file.

    Raises:
        ConfigError: if it is no YAML mapping, or says one thing twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        settings = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(
            f"Expected YAML in '{path}', got at line {line}: {error.problem or error.context}."
        ) from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"Expected YAML in '{path}', got: {one_line(error)}") from error
    if not isinstance(settings, dict):
        kind = "an empty file" if settings is None else f"a {type(settings).__name__}"
        raise ConfigError(
            f"Expected settings such as `data:` in '{path}', got {kind}. Begin with a key, or "
            "leave the file out."
        )
    lines: dict[Keys, int] = {}
    assert node is not None  # it holds a mapping
    _note_lines(node, (), lines, path)
    return Source(settings, path, lines)


def read_arguments(
    arguments: Sequence[str], flags: Sequence[str] = (), positionals: Sequence[str] = ()
) -> Iterator[Source]:
    """Yield the settings of a command line in their order, configs read.

    Args:
        arguments: What follows the name of the command.
        flags: Options that take no value of their own.
        positionals: Settings that are given without their name.

    Raises:
        ConfigError: for an option without its value, or a value without an option.
    """
    rest, unnamed = list(arguments), list(positionals)
    while rest:
        argument = rest.pop(0)
        option, equals, value = argument.partition("=")
        if unnamed and not argument.startswith("-"):
            yield Source({unnamed.pop(0): argument})
            continue
        if option[:2] != "--" and option not in ("-c", *flags):
            raise ConfigError(
                f"Expected settings as `--key value`, got '{argument}' on the command line."
            )
        if option in flags:
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"Expected a value after {option}, got none.")
            value = rest.pop(0)
        inner = _structure(value)
        if option not in ("-c", "--config"):
            yield Source(nested(option.lstrip("-").split("."), inner))
        elif isinstance(inner, dict):  # a config instead of its name
            yield Source(inner)
        else:
            yield read_config(Path(value))


def nested(keys: Sequence[str], value: Any) -> dict[str, Any]:  # noqa: ANN401 - whatever YAML holds
    """Return {"a": {"b": value}} for the keys a and b."""
    for key in reversed(keys):
        value = {key: value}
    return dict(value)


def _structure(value: str) -> Any:  # noqa: ANN401 - whatever YAML holds
    """Return the list or mapping that an argument spells out, any other text as it is."""
    if not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"Expected YAML, got {value!r}: {one_line(error)}") from error


def _note_lines(node: yaml.Node, keys: Keys, lines: dict[Keys, int], path: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        for name, child in node.value:
            inner = (*keys, str(name.value))
            line = name.start_mark.line + 1
            if inner in lines and name.value != "<<":
                raise ConfigError(
                    f"Expected `{'.'.join(inner)}` once in '{path}', got it in lines "
                    f"{lines[inner]} and {line}. Join the two."
                )
            lines[inner] = line
            _note_lines(child, inner, lines, path)
    elif isinstance(node, yaml.SequenceNode):
        for number, child in enumerate(node.value):
            inner = (*keys, str(number))
            lines[inner] = child.start_mark.line + 1
            _note_lines(child, inner, lines, path)
