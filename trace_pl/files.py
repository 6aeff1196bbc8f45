"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from trace_pl.errors import ConfigError


def write_atomically(path: Path, text: str) -> None:
    """Write text to a temporary name beside ``path``, then rename it into place.

    A lone surrogate, which UTF-8 cannot hold, becomes the escape that JSON has for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def unused_name(path: Path) -> Path:
    """Return ``path``, or the first of ``name-1.suffix``, ``name-2.suffix``, ... that is free."""
    number, free = 0, path
    while free.exists():
        number += 1
        free = path.with_stem(f"{path.stem}-{number}")
    return free


def require_writable(folder: Path, setting: str) -> None:
    """Create a folder and prove that files can be written there.

    Args:
        folder: Folder that something will be written to.
        setting: What to change if it cannot.

    Raises:
        ConfigError: if that fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"Expected a writable folder at '{folder}', got: {error}. Set {setting} to a folder "
            "you own."
        ) from error
