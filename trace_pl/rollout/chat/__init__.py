"""The dialogue as tokens: the chat template, and how calls and answers are written."""

from trace_pl.rollout.chat.answer_formats import (
    AnswerFormat,
    AnswerTags,
    BoxedAnswer,
    ExactAnswerLines,
)
from trace_pl.rollout.chat.call_formats import HermesFormat, LlamaFormat, ParsedTurn, ToolCallFormat
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.rollout.chat.xml_format import XmlFormat

__all__ = [
    "AnswerFormat",
    "AnswerTags",
    "BoxedAnswer",
    "ChatTemplate",
    "ExactAnswerLines",
    "HermesFormat",
    "LlamaFormat",
    "ParsedTurn",
    "ToolCallFormat",
    "XmlFormat",
]
