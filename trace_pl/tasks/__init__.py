"""Tasks: questions with gold answers, tools to answer them with, and rewards."""

from trace_pl.tasks.closed_web.task import ClosedWebTask
from trace_pl.tasks.file_task import FileTask
from trace_pl.tasks.matching import exact_match, normalize_answer, token_f1
from trace_pl.tasks.protocol import Split, Task
from trace_pl.tasks.questions import load_questions
from trace_pl.tasks.rewards import EnvironmentReward, ExactMatchReward, TokenF1Reward

__all__ = [
    "ClosedWebTask",
    "EnvironmentReward",
    "ExactMatchReward",
    "FileTask",
    "Split",
    "Task",
    "TokenF1Reward",
    "exact_match",
    "load_questions",
    "normalize_answer",
    "token_f1",
]
