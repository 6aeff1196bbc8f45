"""Rollouts: the agent loop, its rules and its record of tokens."""

from trace_pl.rollout.agent import AgentLoop
from trace_pl.rollout.chat import (
    AnswerFormat,
    AnswerTags,
    BoxedAnswer,
    ChatTemplate,
    ExactAnswerLines,
    HermesFormat,
    LlamaFormat,
    ParsedTurn,
    ToolCallFormat,
    XmlFormat,
)
from trace_pl.rollout.grading import Reward
from trace_pl.rollout.trajectory import AgentLimits

__all__ = [
    "AgentLimits",
    "AgentLoop",
    "AnswerFormat",
    "AnswerTags",
    "BoxedAnswer",
    "ChatTemplate",
    "ExactAnswerLines",
    "HermesFormat",
    "LlamaFormat",
    "ParsedTurn",
    "Reward",
    "ToolCallFormat",
    "XmlFormat",
]
