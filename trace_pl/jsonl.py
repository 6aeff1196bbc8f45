"""Reading JSONL files: one object a line, every complaint with its file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trace_pl.errors import ConfigError, DataError
from trace_pl.text import clean_text


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON object and where it was read."""

    fields: Mapping[str, Any]
    place: str
    """``file:line``, for messages."""

    def identifier(self, *names: str) -> str:
        """Return the first of ``names`` that is there, as text; "007" and "7" stay apart.

        Raises:
            DataError: if none is there, or it is neither text nor a whole number.
        """
        value = self._first(names)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not clean_text(value).strip():
            raise DataError(
                f"Expected a text or a whole number in {_either(names)} at {self.place}, got "
                f"{value!r}. Give every line its own id."
            )
        return clean_text(value).strip()

    def text(self, *names: str) -> str:
        """Return the first of ``names`` that is there, cleaned.

        Raises:
            DataError: if none is there, or it is not text, or nothing of it can be seen.
        """
        value = self._first(names)
        if not isinstance(value, str) or not clean_text(value).strip():
            raise DataError(
                f"Expected a non-empty text in {_either(names)} at {self.place}, got "
                f"{value!r}. Fill it in or drop the line."
            )
        return clean_text(value)

    def _first(self, names: tuple[str, ...]) -> Any:  # noqa: ANN401  (any JSON)
        """Return the first of ``names`` that is there; null is the same as absent."""
        found = (self.fields.get(name) for name in names)
        return next((value for value in found if value is not None), None)


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(f"'{name}'" for name in names)


def read_records(path: str | Path) -> Iterator[Record]:
    """Yield the objects of a JSONL file; blank lines are skipped.

    Raises:
        ConfigError: if there is no such file.
        DataError: if a line is not one JSON object in UTF-8.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"Expected a JSONL file at '{path}', got none. Correct the path or create the file."
        )
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"{path}:{number}"
                yield Record(_parse_object(line, place), place)


def _parse_object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"Expected one JSON object in UTF-8 at {place}, got what cannot be read ({error}). "
            "Repair the line."
        ) from error
    if not isinstance(value, dict):
        raise DataError(
            f"Expected one JSON object at {place}, got {type(value).__name__}. Write each line as "
            '{"id": ..., ...}.'
        )
    return value
