"""Whether a gold answer can be stated and read at all."""

from __future__ import annotations

from trace_pl.errors import DataError
from trace_pl.rollout.chat.answer_formats import AnswerFormat
from trace_pl.rollout.chat.call_formats import ToolCallFormat
from trace_pl.tasks.matching import normalize_answer
from trace_pl.types import Question


def require_readable_answers(
    question: Question, answer_format: AnswerFormat, call_format: ToolCallFormat
) -> None:
    """Refuse gold answers that no policy could state, for example one that holds a closing tag.

    Raises:
        DataError: names the question, the answer, and what would be read instead.
    """
    for gold in question.answers:
        written = answer_format.write(gold)
        message = call_format.parse(written).message
        found = None if message is None else answer_format.read(message)
        if found is None or (found != gold and normalize_answer(found) != normalize_answer(gold)):
            raise DataError(
                f"Expected gold answers of question '{question.id}' that can be stated as "
                f"{written!r}, got {gold!r}, of which {found!r} would be read. Reword or drop the "
                "answer, or choose another `data.answer_format`."
            )
