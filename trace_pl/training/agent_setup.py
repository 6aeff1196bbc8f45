"""The agent of a run, made from its settings: tools, template, engine, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from lightning.pytorch.utilities import rank_zero_warn

from trace_pl.engines.protocol import RolloutEngine
from trace_pl.errors import ConfigError
from trace_pl.models.loading import load_end_ids, load_tokenizer
from trace_pl.models.names import BUILT_IN_BASE, find_model
from trace_pl.rollout.agent import AgentLoop, prompt_of
from trace_pl.rollout.chat.answer_formats import AnswerFormat
from trace_pl.rollout.chat.call_check import check_calls
from trace_pl.rollout.chat.call_formats import ToolCallFormat
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.rollout.chat.template_check import check_template
from trace_pl.rollout.grading import Reward
from trace_pl.rollout.trajectory import AgentLimits
from trace_pl.tasks.protocol import Task
from trace_pl.tasks.readable import require_readable_answers
from trace_pl.tools.protocol import Toolbox
from trace_pl.types import Question

EngineFactory = Callable[[str], RolloutEngine]
"""Given the model's folder, makes the sampling engine."""


class AgentSetup:
    """What the policy meets in a rollout. Nothing is loaded before it is asked for.

    Args:
        task: Gives the tools unless others are given.
        model_name: The policy's model, for its tokenizer and the engine.
        limits: Bounds of one rollout.
        call_format: How the policy writes tool calls.
        answer_format: How it states its final answer.
        reward: Grades finished rollouts.
        system_prompt: Put before the instructions on answers and tools.
        tools: What the policy may call; None means the tools of the task.
    """

    def __init__(
        self,
        task: Task,
        model_name: str,
        limits: AgentLimits,
        call_format: ToolCallFormat,
        answer_format: AnswerFormat,
        reward: Reward,
        system_prompt: str,
        tools: Toolbox | None = None,
    ) -> None:
        self.task = task
        self.model_name = model_name
        self.limits = limits
        self.call_format = call_format
        self.answer_format = answer_format
        self.reward = reward
        self.system_prompt = system_prompt
        self.tools = tools

    @cached_property
    def toolbox(self) -> Toolbox:
        """The tools, ready for many rollouts at once."""
        return self.tools or self.task.toolbox()

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template, which carries tools and answers as the policy writes them.

        Raises:
            ConfigError: if its pieces do not add up to what it renders, or the call format does not
                read its calls.
        """
        template = self._make_template()
        told = f"{self.system_prompt}\n{self.answer_format.instruction}"
        opening = self.answer_format.opening.strip()
        if self.model_name != BUILT_IN_BASE and opening not in told:
            rank_zero_warn(
                f"The prompt does not say that an answer begins with {opening!r}: a model that was "
                "not taught so earns no reward. Leave data.answer_format.init_args.instruction "
                "at null, or say it there or in data.system_prompt."
            )
        return template

    def check(self, question: Question) -> None:
        """Refuse a question that no rollout could answer.

        Raises:
            DataError: if its prompt leaves no room, or an answer cannot be stated and read.
        """
        prompt_of(question, self.template, self.limits, self.system_prompt)
        require_readable_answers(question, self.answer_format, self.call_format)

    def start(self, make_engine: EngineFactory, runs_ahead: bool) -> AgentLoop:
        """Start the engine and return the loop that drives it.

        Args:
            make_engine: Makes the engine.
            runs_ahead: Whether rollouts are collected in a thread while the trainer trains.

        Raises:
            ConfigError: if an engine that shares this process should run ahead, or it cannot read
                as much as a rollout may hold.
        """
        engine = make_engine(find_model(self.model_name))
        if runs_ahead and not engine.runs_apart:
            engine.close()
            raise ConfigError(
                "Expected an engine in a process of its own for data.max_staleness of 1, got "
                f"{type(engine).__name__}. Set data.engine to "
                "trace_pl.engines.ServerEngine, or data.max_staleness to 0."
            )
        return AgentLoop(
            engine,
            # Tokenizers are not made for two threads at once.
            self._make_template() if runs_ahead else self.template,
            self.toolbox,
            self.call_format,
            self.reward,
            self.limits,
            system_prompt=self.system_prompt,
        )

    def _make_template(self) -> ChatTemplate:
        schemas = self.toolbox.schemas()
        template = ChatTemplate(
            load_tokenizer(self.model_name),
            schemas,
            self.call_format.describe(schemas),
            load_end_ids(self.model_name),
            self.answer_format,
        )
        check_template(template)
        check_calls(template, self.call_format)
        return template
