"""The documents a policy may search, and nothing else."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trace_pl.errors import DataError
from trace_pl.jsonl import Record, read_records
from trace_pl.text import clean_text
from trace_pl.tools.analysis import analyse

# A block of "key: value" lines between two "---" lines at the very start. A rule or a table further
# down is part of the text, and so is a first "---" that no such block follows.
_FRONT_MATTER = re.compile(
    r"\A---[ \t]*\n((?:[A-Za-z_][\w -]*:.*\n|[ \t]+\S.*\n|- .*\n|[ \t]*\n)+)---[ \t]*(?:\n|\Z)"
)
_TITLE_LINE = re.compile(r"^title:[ \t]*(.*)(?:\n|\Z)", re.MULTILINE | re.IGNORECASE)

# What may be a title by its form: all of it in quotes, or a short line that is no whole sentence
# and no part of one that goes on in the next line.
_QUOTED = re.compile(r'"(?P<title>[^"]{1,250}|".{1,250}|.{1,250}")"')
_HEADING = re.compile(r".{0,79}[^\s.!?:;,\u3002\uff01\uff1f\u2026]")


@dataclass(frozen=True, slots=True)
class Document:
    """One page."""

    id: str
    title: str
    text: str


class Corpus(Mapping[str, Document]):
    """Documents by docid, in the order given.

    Newlines are normalised and control characters removed; all other text is kept as it came.

    Args:
        documents: At least one; ids are unique.

    Raises:
        DataError: if there is none, or two share an id.
    """

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents: dict[str, Document] = {}
        for document in documents:
            if document.id in self._documents:
                raise DataError(
                    f"Expected unique docids in the corpus, got '{document.id}' twice. Rename or "
                    "drop one of the two documents."
                )
            self._documents[document.id] = Document(
                document.id, clean_text(document.title), clean_text(document.text)
            )
        if not self._documents:
            raise DataError("Expected at least one document in the corpus, got none.")

    @classmethod
    def from_jsonl(cls, path: str | Path) -> Corpus:
        """Read a corpus from a JSONL file.

        Each line holds ``docid`` or ``id``, ``text`` or ``contents`` and, if it likes, ``title``.
        Without that field the title is the one in the front matter at the start of a text, whose
        other lines move below the text; or the first line of ``contents``, the layout of Wikipedia
        dumps, if more follows and it looks like a title: all in double quotes, or at most 80
        letters that neither end like a sentence nor go on in the next line. A document without any
        title is titled by its docid.

        Args:
            path: The file.

        Raises:
            ConfigError: if there is no such file.
            DataError: if it holds no document, a line breaks the format, or two share a docid.
        """
        documents: list[Document] = []
        places: dict[str, str] = {}
        for record in read_records(path):
            document = _document(record)
            if document.id in places:
                raise DataError(
                    f"Expected a new docid at {record.place}, got '{document.id}', which is "
                    f"already at {places[document.id]}. Rename or drop one of the two."
                )
            places[document.id] = record.place
            documents.append(document)
        if not documents:
            raise DataError(f"Expected at least one document in '{path}', got an empty file.")
        return cls(documents)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over all documents, whatever their order."""
        digest = hashlib.sha256()
        for id_ in sorted(self._documents):
            document = self._documents[id_]
            row = json.dumps([document.id, document.title, document.text])
            digest.update(row.encode() + b"\n")
        return digest.hexdigest()

    @cached_property
    def title_terms(self) -> frozenset[str]:
        """Search terms of all titles: the words that name a page."""
        return frozenset(term for doc in self._documents.values() for term in analyse(doc.title))

    def __getitem__(self, docid: str) -> Document:
        """Return the document of that docid."""
        return self._documents[docid]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the docids."""
        return iter(self._documents)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._documents)


def _document(record: Record) -> Document:
    id_ = record.identifier("docid", "id")
    whole = record.text("text", "contents")
    title, text = _split_front_matter(whole)
    named = record.fields.get("title")
    if named is not None and not (isinstance(named, str) and not clean_text(named).strip()):
        title = record.text("title")
    elif not title and record.fields.get("text") is None:
        title, text = _split_first_line(whole)
    return Document(id_, title or id_, text)


def _split_first_line(text: str) -> tuple[str, str]:
    """Return a first line that is a title and the text below it, else "" and the whole text.

    What may be prose stays in the text, for a page is shown as its title and its text.
    """
    line, _, rest = text.strip().partition("\n")
    line = line.strip()
    rest = rest.strip("\n")
    if not rest.strip() or not any(map(str.isalnum, line)):
        return "", text
    if quoted := _QUOTED.fullmatch(line):
        return quoted["title"].replace('""', '"').strip(), rest
    goes_on = rest.lstrip()[0].islower()
    return (line, rest) if _HEADING.fullmatch(line) and not goes_on else ("", text)


def _split_front_matter(text: str) -> tuple[str, str]:
    """Return the title in the front matter ("" if none) and the text without it.

    Authors and dates can be evidence, so they stay; below the text, since a search result shows how
    a text begins.
    """
    front = _FRONT_MATTER.match(text)
    if front is None:
        return "", text
    found = _TITLE_LINE.search(front[1])
    title = found[1].strip().strip("\"'") if found else ""
    rest = _TITLE_LINE.sub("", front[1], count=1).strip("\n")
    return title, "\n\n".join(part for part in (text[front.end() :].strip("\n"), rest) if part)
