"""Finding documents: the index protocol and BM25 on tantivy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import tantivy

from trace_pl.errors import ConfigError
from trace_pl.tools.analysis import analyse
from trace_pl.tools.corpus import Corpus

_FIELDS = ("title", "text")
_HEAP_BYTES = 64_000_000


@dataclass(frozen=True, slots=True)
class Hit:
    """A document found, and how well it fits; scores compare within one query only."""

    docid: str
    score: float


class SearchIndex(ABC):
    """Anything that ranks the documents of a corpus for a query. Safe to call from threads."""

    @abstractmethod
    def search(self, query: str, limit: int) -> list[Hit]:
        """Return at most ``limit`` documents, best first, for any Unicode text."""


class Bm25Index(SearchIndex):
    """BM25 over titles and texts in memory, exact and reproducible.

    A document scores the sum over both fields and the distinct terms t of the query of

        ln(1 + (D - df + 0.5) / (df + 0.5)) * (k1 + 1) * tf / (tf + k1 * (1 - b + b * L / mean L))

    with D documents, df of them with t in the field, tf times t in a field of L terms, k1 = 1.2 and
    b = 0.75. Tantivy keeps L in one byte: exact up to 40 terms, then rounded down. Equal scores are
    ordered by docid. Queries are made of terms, so no character has a special meaning.

    The index is made at once, not in the first search, which would run against a tool's timeout. A
    pickled copy, as a spawned process gets it, makes its own in its first search.

    Args:
        corpus: What to search.
    """

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
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
                self._searcher = self._make().searcher()
            return self._searcher

    def _make(self) -> tantivy.Index:
        """Return the index, built or found."""
        return self._build(None)

    def _build(self, path: Path | None) -> tantivy.Index:
        """Write the index to an empty folder, or to memory."""
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

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one process."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_searcher", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the rest; the index opens in the first search."""
        self.__dict__.update(state)
        self._searcher = None
        self._lock = Lock()


def _schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    for field in _FIELDS:
        builder.add_text_field(field, tokenizer_name="whitespace", index_option="freq")
    builder.add_integer_field("row", fast=True)
    return builder.build()


_SCHEMA = _schema()
