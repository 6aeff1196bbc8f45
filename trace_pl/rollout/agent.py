"""The agent loop: questions in, groups of finished rollouts out, no barrier between turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import replace

from trace_pl.distributed.question_queue import QuestionQueue
from trace_pl.engines.protocol import RolloutEngine
from trace_pl.errors import ConfigError, DataError
from trace_pl.rollout.call_runner import CallRunner
from trace_pl.rollout.chat.call_formats import ToolCallFormat
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.rollout.grading import Grader, Reward
from trace_pl.rollout.phase import RolloutPhase
from trace_pl.rollout.progress import Progress
from trace_pl.rollout.trajectory import AgentLimits, AgentRules
from trace_pl.tools.protocol import Toolbox
from trace_pl.types import Question, Rollout, RolloutGroup, ToolResult


class AgentLoop:
    """Runs the policy with tools.

    Args:
        engine: samples responses.
        template: chat template of the policy, made with the toolbox's schemas.
        toolbox: the tools.
        call_format: how the policy writes calls and answers.
        reward: outcome reward.
        limits: bounds of one rollout.
        system_prompt: instructions before the tools' description; may be empty.
        num_threads: tool calls, and apart from them rewards, that run at the same time.

    Raises:
        ConfigError: if a trajectory may grow longer than the engine can read.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        template: ChatTemplate,
        toolbox: Toolbox,
        call_format: ToolCallFormat,
        reward: Reward,
        limits: AgentLimits,
        system_prompt: str = "",
        num_threads: int = 32,
    ) -> None:
        if limits.max_trajectory_tokens > engine.max_model_len:
            raise ConfigError(
                f"Expected limits.max_trajectory_tokens of at most the engine's max_model_len "
                f"({engine.max_model_len}), got {limits.max_trajectory_tokens}. Lower the limit or "
                "raise `data.engine.init_args.max_model_len`."
            )
        self.engine = engine
        self.template = template
        self.toolbox = toolbox
        self.reward = reward
        self.limits = limits
        self.system_prompt = system_prompt
        self.num_threads = num_threads
        self.rules = AgentRules(template, call_format, limits)

    def collect(
        self, questions: Sequence[Question], group_size: int, progress: Progress | None = None
    ) -> list[RolloutGroup]:
        """Sample ``group_size`` rollouts of each question and return all groups.

        Args:
            questions: what to ask.
            group_size: rollouts per question (G).
            progress: told how far it is.

        Returns:
            One group per question, in order, possibly without a rollout.

        Raises:
            DataError: if a question's prompt leaves no room to respond.
            RolloutError: if no rollout could be finished.
        """
        groups = dict(self.stream(questions, group_size, progress))
        return [groups[position] for position in range(len(questions))]

    def stream(
        self,
        questions: Sequence[Question],
        group_size: int,
        progress: Progress | None = None,
        queue: QuestionQueue | None = None,
    ) -> Generator[tuple[int, RolloutGroup], None, None]:
        """Sample ``group_size`` rollouts of each question and yield each group when it is complete.

        Every rollout advances as soon as its own tool result is back. Random numbers depend on the
        engine's seed, policy version, question, rollout and turn alone, so the same call gives the
        same rollouts again (up to rounding), however fast tools answer; only the order in which
        groups are complete is theirs. Whoever closes the iterator early, or ends it by an
        exception, cancels the rollouts that have not ended.

        Args:
            questions: what to ask; a question that comes twice gets two groups.
            group_size: rollouts per question (G).
            progress: told how far it is, after every step of the engine.
            queue: gives the positions of the questions to ask, one whenever the engine has room for
                it, and says when to stop; None asks all.

        Yields:
            Position of the question, and its group with rollouts sorted by index. A rollout whose
            tools or reward failed or that ran out of time is left out, so a group may be smaller
            than G, or empty.

        Raises:
            DataError: if a question's prompt leaves no room to respond.
            RolloutError: if no rollout of the phase could be finished, or a reward returned what is
                no grade.
        """
        prompts = [
            prompt_of(question, self.template, self.limits, self.system_prompt)
            for question in questions
        ]
        limits = self.limits
        tools = CallRunner[ToolResult](self.num_threads, limits.tool_timeout_s, limits.tool_retries)
        grader = Grader(
            self.reward, self.num_threads, limits.reward_timeout_s, limits.reward_retries
        )
        phase = RolloutPhase(
            self.engine, tools, self.toolbox, self.rules, self._prompt_with, grader
        )
        queue = queue or QuestionQueue(len(questions))
        streams = _streams(questions, self.engine.version)
        ended: list[list[Rollout]] = [[] for _ in questions]
        try:
            while not queue.has_enough():
                while phase.has_room(queue.fair_share * group_size):
                    taken = queue.take()
                    if taken is None:
                        break
                    for index in range(group_size):
                        stream = f"{streams[taken]}/{index}"
                        phase.start(taken, questions[taken], index, stream, prompts[taken])
                if not phase.is_working:
                    phase.require_any()
                    return
                news = phase.advance()
                if progress is not None:
                    progress(phase.counts)
                for position, rollout in news:
                    ended[position].append(rollout)
                    if len(ended[position]) == group_size:
                        yield position, _group(questions[position], ended[position])
        finally:
            phase.cancel()
            tools.close()
            grader.close()

    def _prompt_with(self, question: Question, opening: str) -> list[int]:
        """Return the prompt of a question followed by what the tools of a rollout say at first."""
        longer = replace(question, text=question.text + opening)
        return prompt_of(longer, self.template, self.limits, self.system_prompt)


def _streams(questions: Sequence[Question], version: int) -> list[str]:
    """Return what names the random numbers of each question, whoever asks it."""
    copies: Counter[str] = Counter()
    streams = []
    for question in questions:
        streams.append(f"{version}/{question.id}/{copies[question.id]}")
        copies[question.id] += 1
    return streams


def prompt_of(
    question: Question, template: ChatTemplate, limits: AgentLimits, system_prompt: str
) -> list[int]:
    """Return the tokens of a question's prompt.

    Raises:
        DataError: if it leaves no room to respond.
    """
    ids = template.prompt_ids(system_prompt, question.text)
    least = len(ids) + len(template.generation_header) + 1
    if least > limits.max_trajectory_tokens:
        raise DataError(
            f"Expected a prompt that leaves room within limits.max_trajectory_tokens "
            f"({limits.max_trajectory_tokens}) for question '{question.id}', got {len(ids)} "
            "tokens. Raise the limit or drop the question."
        )
    return ids


def _group(question: Question, ended: Sequence[Rollout]) -> RolloutGroup:
    countable = [rollout for rollout in ended if rollout.stop_reason.counts]
    return RolloutGroup(question, tuple(sorted(countable, key=lambda rollout: rollout.index)))
