"""A BM25 index that is built once for a corpus and read from disk by everyone who needs it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tantivy

from trace_pl.errors import ConfigError, one_line
from trace_pl.files import folder_beside
from trace_pl.tools.analysis import ANALYSIS
from trace_pl.tools.corpus import Corpus
from trace_pl.tools.index import Bm25Index

logger = logging.getLogger(__name__)

_LABEL = "trace_pl.json"


class StoredBm25Index(Bm25Index):
    """BM25 as of :class:`Bm25Index`, kept on disk.

    Each corpus has a subfolder, named after its content and what made the index, so a changed
    corpus or version gets another one. The first process builds it; those that start with it wait,
    and later ones find it. Its pages are mapped, so processes of one machine share them in memory.
    A damaged one is built again. All of it may be deleted at any time.

    Args:
        corpus: What to search.
        folder: Where the indexes of all corpora are kept. None means ``trace_pl/indexes`` in the
            user's cache (``XDG_CACHE_HOME``, else ``~/.cache``), or where that cannot be written a
            folder of the user for temporary files, or else memory.

    Raises:
        ConfigError: if a folder that was named cannot be used.
    """

    def __init__(self, corpus: Corpus, folder: str | None = None) -> None:
        self.folder = folder
        super().__init__(corpus)

    def _make(self) -> tantivy.Index:
        label = self._label()
        digest = hashlib.sha256(json.dumps(label, sort_keys=True).encode()).hexdigest()
        name = f"bm25-{digest[:24]}"
        if self.folder is not None:
            try:
                return self._found_or_stored(Path(self.folder).expanduser() / name, label)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"Expected a folder for search indexes at '{self.folder}', got: "
                    f"{one_line(error)}. Name one that you can write to as `folder` of the index."
                ) from error
        for folder in (_user_cache, _user_temporary):
            try:
                return self._found_or_stored(folder() / name, label)
            except (OSError, ValueError, RuntimeError) as error:
                logger.warning("No search index is kept on disk: %s", one_line(error))
        return super()._make()

    def _found_or_stored(self, path: Path, label: dict[str, Any]) -> tantivy.Index:
        index = self._found(path, label)
        if index is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path.with_suffix(".lock")):
                index = self._found(path, label) or self._store(path, label)
        return index

    def _found(self, path: Path, label: dict[str, Any]) -> tantivy.Index | None:
        """Return the index in a folder if it is all there."""
        if not path.exists():
            return None
        try:
            stored = json.loads((path / _LABEL).read_text())
            if stored["label"] == label and stored["files"] == _sizes(path):
                index = tantivy.Index.open(str(path))
                if index.searcher().num_docs == len(self._docids):
                    return index
            problem = "files are missing, cut or of another index"
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = one_line(error)
        logger.warning("The search index in '%s' cannot be used: %s", path, problem)
        return None

    def _store(self, path: Path, label: dict[str, Any]) -> tantivy.Index:
        """Build the index under another name and move it into place, so nobody sees half of it."""
        for left in path.parent.glob(f".{path.name}.*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        print(f"Building a search index of {len(self._docids):,} documents in {path} ...")
        with folder_beside(path, replaces=True) as draft:  # a damaged one, if any
            self._build(draft)
            contents = {"label": label, "files": _sizes(draft)}
            (draft / _LABEL).write_text(json.dumps(contents))
            for file in draft.glob("*.lock"):  # held while an index opens, by whoever reads it
                file.chmod(0o666)
        return tantivy.Index.open(str(path))

    def _label(self) -> dict[str, Any]:
        return {
            "layout": 1,  # of the fields; to be counted up when they change
            "corpus": self.corpus.fingerprint,
            "analysis": ANALYSIS,
            "tantivy": version("tantivy"),
        }


def _sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each file of an index; locks and our own label are none."""
    return {
        file.name: file.stat().st_size
        for file in folder.iterdir()
        if file.name != _LABEL and not file.name.startswith(".")
    }


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that other processes wait for; it goes with the process that holds it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another process that builds the search index ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _user_cache() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "trace_pl" / "indexes"


def _user_temporary() -> Path:
    """Return a folder for temporary files that nobody else can have put anything into.

    Raises:
        OSError: if somebody else owns the folder of this name.
    """
    folder = Path(tempfile.gettempdir()) / f"trace_pl-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or folder.is_symlink():
        raise PermissionError(f"'{folder}' belongs to somebody else")
    return folder
