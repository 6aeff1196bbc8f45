"""Question files: one JSON object a line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trace_pl.errors import DataError
from trace_pl.jsonl import Record, read_records
from trace_pl.tasks.matching import normalize_answer
from trace_pl.text import clean_text
from trace_pl.types import Question

_ANSWER_FIELDS = ("answer", "golden_answers", "answers")
_KNOWN_FIELDS = {"id", "question", "answer_aliases"}


def load_questions(path: str | Path) -> list[Question]:
    """Read questions from a JSONL file, in the order of its lines.

    Each line holds ``id``, ``question`` and the gold answer in the first of ``answer``,
    ``golden_answers``, ``answers`` or ``reward_model.ground_truth.target`` that is there; further
    accepted answers in ``answer_aliases``. All other fields become ``Question.meta``, of which
    ``evidence``, a list of docids, is read by metrics. A field that is null is as good as absent.

    Args:
        path: The file.

    Returns:
        The questions; the first answer of each is canonical.

    Raises:
        ConfigError: if there is no such file.
        DataError: if it holds no question, a line breaks the format, a gold answer could never be
            matched, or two lines share an id.
    """
    questions: dict[str, Question] = {}
    places: dict[str, str] = {}
    for record in read_records(path):
        question = _question(record)
        if question.id in questions:
            raise DataError(
                f"Expected a new id at {record.place}, got '{question.id}', which is already at "
                f"{places[question.id]}. Rename or drop one of the two."
            )
        questions[question.id] = question
        places[question.id] = record.place
    if not questions:
        raise DataError(f"Expected at least one question in '{path}', got an empty file.")
    return list(questions.values())


def gold_answers(value: object) -> tuple[str, ...]:
    """Return the answers in any of the shapes that published data sets use.

    Args:
        value: A text or a number, a list, tuple or array of them, or ``{"target": ...}``.

    Returns:
        The distinct answers in their order; none for an empty list.

    Raises:
        DataError: if the value has another shape.
    """
    return tuple(dict.fromkeys(_answers(value)))


def fingerprint(questions: Iterable[Question]) -> str:
    """Return a SHA-256 over ids, texts and answers, in order.

    A position in the data means something only together with it.
    """
    digest = hashlib.sha256()
    for question in questions:
        row = json.dumps([question.id, question.text, list(question.answers)])
        digest.update(row.encode() + b"\n")
    return digest.hexdigest()


def _answers(value: object) -> list[str]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping) and "target" in value:
        return _answers(value["target"])
    if isinstance(value, list | tuple):
        return [answer for item in value for answer in _answers(item)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str):
        return [clean_text(value).strip()]
    raise DataError(
        f"Expected a text, a list of texts or {{'target': ...}} as gold answer, got {value!r}."
    )


def _question(record: Record) -> Question:
    id_ = record.identifier("id")
    source, value = _answer_field(record)
    try:
        aliases = record.fields.get("answer_aliases")
        answers = gold_answers([value, [] if aliases is None else aliases])
    except DataError as error:
        raise DataError(f"{error} Correct {record.place}, question '{id_}'.") from error
    if not answers or not all(map(normalize_answer, answers)):
        raise DataError(
            f"Expected gold answers with at least one letter or digit at {record.place}, question "
            f"'{id_}', got {list(answers)!r}. Such an answer can never be matched: drop it."
        )
    known = _KNOWN_FIELDS | {source}
    meta = {k: v for k, v in record.fields.items() if k not in known and v is not None}
    text = record.text("question").strip()
    try:
        return Question(id_, text, answers, meta)
    except DataError as error:
        raise DataError(f"{error} It is at {record.place}.") from error


def _answer_field(record: Record) -> tuple[str, Any]:
    """Return the name and content of the field that holds the gold answer."""
    for name in _ANSWER_FIELDS:
        if record.fields.get(name) is not None:
            return name, record.fields[name]
    value: Any = record.fields
    for name in ("reward_model", "ground_truth", "target"):
        value = value.get(name) if isinstance(value, Mapping) else None
    if value is None:
        raise DataError(
            f"Expected a gold answer at {record.place}, got none. Put it in one of "
            f"{', '.join(_ANSWER_FIELDS)} or reward_model.ground_truth.target."
        )
    return "reward_model", value
