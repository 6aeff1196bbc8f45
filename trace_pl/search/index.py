"""Finding documents: the index protocol and BM25 on tantivy."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import tantivy

from trace_pl.errors import ConfigError
from trace_pl.search.analysis import ANALYSIS, analyse
from trace_pl.search.corpus import Corpus

_FIELDS = ("title", "text")
_HEAP_BYTES = 64_000_000


@dataclass(frozen=True, slots=True)
class Hit:
    """A document found, and how well it fits; scores compare within one query only."""

    docid: str
    score: float


class SearchIndex(Protocol):
    """Anything that ranks the documents of a corpus for a query. Safe to call from threads."""

    def search(self, query: str, limit: int) -> list[Hit]:
        """Return at most ``limit`` documents, best first, for any Unicode text."""


class Bm25Index:
    """BM25 over titles and texts, exact and reproducible.

    A document scores the sum over both fields and the distinct terms t of the query of

        ln(1 + (D - df + 0.5) / (df + 0.5)) * (k1 + 1) * tf / (tf + k1 * (1 - b + b * L / mean L))

    with D documents, df of them with t in the field, tf times t in a field of L terms, k1 = 1.2 and
    b = 0.75. Tantivy keeps L in one byte: exact up to 40 terms, then rounded down. Equal scores are
    ordered by docid. Queries are made of terms, so no character has a special meaning.

    The index is built at once, not in the first search, which would run against a tool's timeout.
    A pickled copy, as a spawned process gets it, builds or opens its own in its first search.

    Args:
        corpus: What to search.
        folder: Where to keep the index for other runs over this corpus; None keeps it in memory.

    Raises:
        ConfigError: if the folder holds an index of another corpus, or anything else.
    """

    def __init__(self, corpus: Corpus, folder: str | None = None) -> None:
        self.corpus = corpus
        self.folder = folder
        self._docids = sorted(corpus)
        self._searcher: tantivy.Searcher | None = None
        self._lock = Lock()
        self._open()

    def search(self, query: str, limit: int) -> list[Hit]:
        """Return at most ``limit`` hits, best first; none if no term of the query occurs.

        Args:
            query: Any Unicode text.
            limit: At least 1.
        """
        if limit < 1:
            raise ConfigError(f"Expected a limit of at least 1 hit, got {limit}.")
        parts = [
            (tantivy.Occur.Should, tantivy.Query.term_query(_SCHEMA, field, term))
            for term in dict.fromkeys(analyse(query))
            for field in _FIELDS
        ]
        if not parts:
            return []
        hits = self._ranked(tantivy.Query.boolean_query(parts), limit)
        return sorted(hits, key=lambda hit: (-hit.score, hit.docid))[:limit]

    def _ranked(self, query: tantivy.Query, limit: int) -> list[Hit]:
        """Return the best ``limit`` hits and all that tie with the last of them."""
        searcher = self._open()
        size = limit + 1
        while True:
            found = searcher.search(query, size, count=False).hits
            if len(found) < size or found[limit - 1][0] > found[-1][0]:
                break
            size *= 2
        rows = searcher.fast_field_values("row", [address for _, address in found])
        return [
            Hit(self._docids[int(row or 0)], float(score))
            for (score, _), row in zip(found, rows, strict=True)
        ]

    def _open(self) -> tantivy.Searcher:
        with self._lock:
            if self._searcher is None:
                index = self._in_folder(Path(self.folder)) if self.folder else self._built(None)
                self._searcher = index.searcher()
            return self._searcher

    def _built(self, path: Path | None) -> tantivy.Index:
        index = tantivy.Index(_SCHEMA, path=str(path) if path else None, reuse=False)
        # One thread writes one run of segments in a fixed order.
        with index.writer(_HEAP_BYTES, num_threads=1) as writer:
            for row, docid in enumerate(self._docids):
                document = self.corpus[docid]
                writer.add_document(
                    tantivy.Document(
                        title=" ".join(analyse(document.title)),
                        text=" ".join(analyse(document.text)),
                        row=row,
                    )
                )
        index.reload()
        # A writer whose thread died says so only to the next document.
        assert index.searcher().num_docs == len(self._docids)
        return index

    def _in_folder(self, folder: Path) -> tantivy.Index:
        """Open the stored index of this corpus, or store it first.

        It is built under another name and moved into place, so that processes which start together
        never see half of one.
        """
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
            try:
                self._built(draft)
                (draft / _LABEL).write_text(json.dumps(self._label()))
                if not folder.exists():
                    os.rename(draft, folder)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        label = folder / _LABEL
        stored = json.loads(label.read_text()) if label.is_file() else None
        if stored != self._label():
            raise ConfigError(
                f"Expected an index of corpus {self.corpus.fingerprint[:12]} in '{folder}', got "
                f"{stored or 'something else'}. Delete the folder or name another one."
            )
        return tantivy.Index.open(str(folder))

    def _label(self) -> dict[str, str]:
        return {
            "corpus": self.corpus.fingerprint,
            "analysis": ANALYSIS,
            "tantivy": version("tantivy"),
        }

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one process."""
        return {"corpus": self.corpus, "folder": self.folder, "_docids": self._docids}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the rest; the index opens in the first search."""
        self.__dict__.update(state)
        self._searcher = None
        self._lock = Lock()


_LABEL = "trace_pl.json"


def _schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    for field in _FIELDS:
        builder.add_text_field(field, tokenizer_name="whitespace", index_option="freq")
    builder.add_integer_field("row", fast=True)
    return builder.build()


_SCHEMA = _schema()
