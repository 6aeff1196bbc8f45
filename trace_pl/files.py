"""Writing files and folders so that nobody ever sees half of one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from trace_pl.errors import ConfigError


@contextmanager
def file_beside(path: Path, is_durable: bool = False) -> Iterator[BinaryIO]:
    """Yield an open file that takes the name ``path`` when the block ends well.

    Until then what had the name before is untouched, and a block that fails leaves nothing behind.

    Args:
        path: Name of the file; its folder is created.
        is_durable: Whether it has to be on the disk before it has its name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)


@contextmanager
def folder_beside(path: Path, replaces: bool = False) -> Iterator[Path]:
    """Yield a folder that takes the name ``path`` when the block ends well; see `file_beside`.

    Args:
        path: Name of the folder; the one that holds it is created.
        replaces: Whether it takes the place of a folder or file that has the name; else that is an
            OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield draft
        draft.chmod(0o755)
        for file in draft.rglob("*"):
            file.chmod(file.stat().st_mode | 0o444)  # some libraries write for the owner alone
        if replaces:
            replace_folder(draft, path)
        else:
            os.rename(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # it has another name if all went well


def replace_folder(new: Path, path: Path) -> None:
    """Give a finished folder its name; one that had it before is gone only then."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.is_dir():
        path.rename(old)
    else:
        path.unlink(missing_ok=True)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a file of text as a whole; see `file_beside`.

    A lone surrogate, which UTF-8 cannot hold, becomes the escape that JSON has for it.
    """
    with file_beside(path) as file:
        file.write(text.encode("utf-8", errors="backslashreplace"))


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
