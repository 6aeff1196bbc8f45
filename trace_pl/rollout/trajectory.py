"""One rollout while it runs, and the rules for what happens to it next."""

from __future__ import annotations

from dataclasses import dataclass

from trace_pl.engines.protocol import Completion
from trace_pl.errors import ConfigError
from trace_pl.rollout.chat.call_formats import ToolCallFormat
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.rollout.clean import UnsafeCall, clean_call, clean_result
from trace_pl.rollout.record import TokenRecord
from trace_pl.text import clean_text
from trace_pl.tools.protocol import ToolSession
from trace_pl.types import Question, StopReason, TokenKind, ToolCall, ToolResult


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """Bounds of one rollout; the defaults are those of the paper's training runs."""

    max_turns: int = 60
    """Tool turns; after the last one the policy may still answer."""
    max_response_tokens: int = 4096
    """Sampled tokens of one response."""
    max_trajectory_tokens: int = 49_152
    """Tokens of the whole record, prompt and observations included."""
    max_consecutive_errors: int = 3
    """Tool turns in a row with an error result."""
    tool_timeout_s: float = 20.0
    """Seconds for one attempt of a tool call."""
    tool_retries: int = 1
    """Further attempts of a tool call that failed or ran out of time."""
    reward_timeout_s: float = 60.0
    """Seconds for one attempt to grade a finished rollout."""
    reward_retries: int = 1
    """Further attempts of a reward that failed or ran out of time; then its rollout is left out."""
    max_seconds: float | None = None
    """Seconds from a rollout's start to its grade, waiting for engine, tools and reward included;
    None sets no bound. A rollout beyond it is left out like one whose tools failed, so this is for
    the rare straggler: which rollouts it meets depends on the clock and cannot be reproduced."""

    @property
    def slowest_s(self) -> float:
        """Seconds that tools and reward may take in a rollout that counts; sampling is on top."""
        if self.max_seconds is not None:
            return self.max_seconds
        calls = self.max_turns * self.tool_timeout_s * (1 + self.tool_retries)
        return calls + self.reward_timeout_s * (1 + self.reward_retries)

    def __post_init__(self) -> None:
        least = {
            "max_turns": 1,
            "max_response_tokens": 1,
            "max_trajectory_tokens": 2,
            "max_consecutive_errors": 1,
            "tool_retries": 0,
            "reward_retries": 0,
        }
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ConfigError(
                    f"Expected limits.{name} of at least {minimum}, got {getattr(self, name)}."
                )
        for name in ("tool_timeout_s", "reward_timeout_s", "max_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and seconds <= 0.0:
                raise ConfigError(f"Expected limits.{name} above 0, got {seconds}.")


@dataclass(eq=False, slots=True)
class Trajectory:
    """A rollout that is not finished."""

    position: int
    """Index of the question in the phase."""
    question: Question
    index: int
    """Position in the group."""
    stream: str
    """Names the random numbers of this rollout."""
    attempt: int
    session: ToolSession
    record: TokenRecord
    started: float
    """``time.monotonic()`` at the start of its first attempt."""
    is_closed: bool = False
    """Whether its session was given up."""
    consecutive_errors: int = 0
    num_requests: int = 0
    """Responses asked for, those of a failed attempt included."""
    number: int = 0
    """Place among the rollouts of the phase, in the order in which they began."""

    @property
    def id(self) -> str:
        """Name of the rollout in messages: question id and group position."""
        return f"{self.question.id}/{self.index}"


@dataclass(frozen=True, slots=True)
class Finish:
    """The rollout is over."""

    reason: StopReason
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class RunTool:
    """A call is to be run."""

    call: ToolCall
    note: str
    """Goes before the result's text; often empty."""


@dataclass(frozen=True, slots=True)
class Reject:
    """The response cannot be used; there is nothing to run."""

    error: str
    """Text for the policy."""


class AgentRules:
    """What a response, an observation or a limit means for a trajectory; no engine, no tools."""

    def __init__(
        self, template: ChatTemplate, call_format: ToolCallFormat, limits: AgentLimits
    ) -> None:
        self.template = template
        self.call_format = call_format
        self.limits = limits

    def open_response(self, trajectory: Trajectory) -> int:
        """Append the generation header and return how many tokens may be sampled.

        Both limits hold before anything is generated. 0 means that there is no room; the header is
        then not appended.
        """
        header = self.template.generation_header
        room = self.limits.max_trajectory_tokens - len(trajectory.record) - len(header)
        if room < 1:
            return 0
        trajectory.record.append(header, TokenKind.TEMPLATE)
        return min(self.limits.max_response_tokens, room)

    def read(self, trajectory: Trajectory, completion: Completion) -> Finish | RunTool | Reject:
        """Append a sampled response and say what follows from it."""
        ids = completion.token_ids
        trajectory.record.append(ids, TokenKind.ACTION, completion.logprobs)
        if completion.finish_reason == "length":
            # A cut response is graded as it stands; nothing of it is run, no token is added.
            is_response_limit = len(ids) >= self.limits.max_response_tokens
            return Finish(StopReason.LENGTH if is_response_limit else StopReason.MAX_TOKENS)
        text = self.template.decode(ids[:-1])
        parsed = self.call_format.parse(text, self.template.thinking_open, self.template.tools)
        if parsed.message is not None:
            answer = self.template.answer_format.read(clean_text(parsed.message))
            return Finish(StopReason.ANSWERED, answer)
        if len(trajectory.record.turns) >= self.limits.max_turns:
            return Finish(StopReason.MAX_TURNS)
        if parsed.error is not None:
            return Reject(parsed.error)
        try:
            return RunTool(clean_call(parsed.calls[0]), parsed.note)
        except UnsafeCall as problem:
            return Reject(f"Error: {problem} Nothing was run.")

    def observe(
        self, trajectory: Trajectory, call: ToolCall, result: ToolResult
    ) -> StopReason | None:
        """Append an observation, which ends a turn; return why the rollout ends, if it does.

        An observation that does not fit is left out whole: there are no half turns.
        """
        record, template = trajectory.record, self.template
        result = clean_result(result)
        ids = template.observation_ids(result.text)
        before = template.observation_open
        if record.token_ids[-1] != template.end_of_turn:
            # Another stop token was sampled. It stays as it is, and the dialogue goes on as the
            # template writes it: with exactly one end of turn, which carries no loss here.
            before = [template.end_of_turn, *before]
        added = len(before) + len(ids) + len(template.observation_close)
        if len(record) + added > self.limits.max_trajectory_tokens:
            return StopReason.MAX_TOKENS
        record.append(before, TokenKind.TEMPLATE)
        record.append(ids, TokenKind.OBSERVATION)
        record.append(template.observation_close, TokenKind.TEMPLATE)
        record.close_turn(call, result)
        trajectory.consecutive_errors += 1
        if result.error is None:
            trajectory.consecutive_errors = 0
        if result.done:
            return StopReason.DONE
        if trajectory.consecutive_errors >= self.limits.max_consecutive_errors:
            return StopReason.TOOL_FAILURE
        return None
