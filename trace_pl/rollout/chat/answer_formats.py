"""How the policy states its final answer: what it is told, how it is read, and how it begins."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import ClassVar


class AnswerFormat(ABC):
    """One way to write a final answer, so that prompt, reader and prober cannot disagree.

    Args:
        instruction: What the system prompt says of the format. None takes the format's own words;
            "" says nothing, for a model that was taught the format.
    """

    default_instruction: ClassVar[str]
    opening: ClassVar[str]
    """What stands before the answer; the prober puts it before the gold answer."""
    closing: ClassVar[str]
    """What stands after the answer."""

    def __init__(self, instruction: str | None = None) -> None:
        self.instruction = self.default_instruction if instruction is None else instruction

    @abstractmethod
    def read(self, message: str) -> str | None:
        """Return the answer of a final message, None if it states none; never raises.

        Args:
            message: What the policy wrote last, after its thinking.
        """

    def write(self, answer: str) -> str:
        """Return an answer as the policy would state it."""
        return f"{self.opening}{answer}{self.closing}"


class AnswerTags(AnswerFormat):
    """``<answer>Paris</answer>``; the last complete pair of tags counts."""

    default_instruction = (
        "When you know the answer, state it once at the end of your last message, as short as "
        "possible and between tags: <answer>your answer</answer>. Nothing else is graded."
    )
    opening = "<answer>"
    closing = "</answer>"

    def read(self, message: str) -> str | None:
        """Return the answer of a final message, None if it states none; never raises."""
        answers = _TAGGED.findall(message)
        return answers[-1].strip() if answers else None


class ExactAnswerLines(AnswerFormat):
    """The lines that BrowseComp asks for; the last line ``Exact Answer: Paris`` counts.

    Markdown around key and value is not part of the answer, and the colon may be a full-width one.
    """

    default_instruction = (
        "When you know the answer, end with a message of this form:\n"
        "Explanation: {your explanation for your final answer}\n"
        "Exact Answer: {your succinct, final answer}\n"
        "Confidence: {your confidence score between 0% and 100% for your answer}"
    )
    opening = "Exact Answer: "
    closing = "\nConfidence: 100%"

    def read(self, message: str) -> str | None:
        """Return the answer of a final message, None if it states none; never raises."""
        answers = _EXACT_ANSWER.findall(message)
        return answers[-1].strip(_AROUND_VALUE) if answers else None


class BoxedAnswer(AnswerFormat):
    r"""``\boxed{Paris}`` as in mathematics; the last box whose braces are balanced counts.

    A box of nothing but ``\text{Paris}`` holds ``Paris``.
    """

    default_instruction = (
        "When you know the answer, state it once at the end of your last message, as short as "
        r"possible and in a box: \boxed{your answer}. Nothing else is graded."
    )
    opening = r"\boxed{"
    closing = "}"

    def read(self, message: str) -> str | None:
        """Return the answer of a final message, None if it states none; never raises."""
        box = _last_box(message)
        if box is None:
            return None
        plain = _PLAIN_TEXT.fullmatch(box.strip())
        return (plain[1] if plain else box).strip()


# None of these can take more than linear time: a policy may write anything.
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_EXACT_ANSWER = re.compile(
    r"^[ \t>#*_`\u2022-]*exact[ \t]+answer[ \t*_`]*[:\uff1a](.*)$", re.IGNORECASE | re.MULTILINE
)
_AROUND_VALUE = " \t\r\u00a0*_`"
_BRACES = re.compile(r"\\\\?boxed\s*\{|\\[\\{}]|[{}]")
_PLAIN_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")


def _last_box(text: str) -> str | None:
    """Return what the last complete box holds; of nested ones the innermost."""
    opened: list[tuple[bool, int]] = []  # whether it is a box, and where its content begins
    found = (-1, -1)
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{" or "boxed" in token:
            opened.append((token != "{", match.end()))
        elif token == "}" and opened:
            is_box, begin = opened.pop()
            found = max(found, (begin, match.start())) if is_box else found
    begin, end = found
    return text[begin:end] if begin >= 0 else None
