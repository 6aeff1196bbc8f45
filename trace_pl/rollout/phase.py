"""One collection of rollouts while it runs: who waits for the engine, a tool or the reward."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from trace_pl.engines.protocol import Completion, GenerationRequest, RolloutEngine
from trace_pl.errors import RolloutError
from trace_pl.rollout.call_runner import CallOutcome, CallRunner
from trace_pl.rollout.clean import require_result
from trace_pl.rollout.closer import Closer
from trace_pl.rollout.grading import Grader, require_grade
from trace_pl.rollout.progress import RolloutCounts
from trace_pl.rollout.record import prompt_record
from trace_pl.rollout.trajectory import AgentRules, Finish, Reject, Trajectory
from trace_pl.text import clean_text
from trace_pl.tools.protocol import Toolbox, ToolSession
from trace_pl.types import Grade, Question, Rollout, StopReason, ToolCall, ToolResult

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 2  # of one rollout whose tools failed
# Ids never repeat, so what an interrupted phase left in the engine matches nothing later.
_NUMBERS = count()
_NO_GRADE = Grade(0.0, is_correct=False)  # of what is left out
_IDLE_WAIT_S = 0.05  # between looks at the clock while the engine has no work
_SURPLUS = 4  # rollouts on their way per place in the engine: tools may take 3/4 of the time


class RolloutPhase:
    """Advances many trajectories, each as soon as what it waits for is there.

    Args:
        engine: samples responses.
        tools: runs tool calls.
        toolbox: makes the tools of each rollout.
        rules: what a response or an observation means.
        prompt_with: makes the prompt of a question and what its tools say at first.
        grader: grades finished rollouts.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tools: CallRunner[ToolResult],
        toolbox: Toolbox,
        rules: AgentRules,
        prompt_with: Callable[[Question, str], Sequence[int]],
        grader: Grader,
    ) -> None:
        self.engine = engine
        self.tools = tools
        self.toolbox = toolbox
        self.rules = rules
        self.prompt_with = prompt_with
        self.grader = grader
        self.counts = RolloutCounts()
        self._version = engine.version
        self._generating: dict[str, Trajectory] = {}
        self._closer = Closer(rules.limits.tool_timeout_s)
        self._opening: dict[str, Trajectory] = {}
        self._acting: dict[str, tuple[Trajectory, ToolCall, str]] = {}
        self._grading: dict[str, tuple[Trajectory, Finish]] = {}
        self._ended: list[tuple[int, Rollout]] = []
        self._any_counts = False
        self._last_failure = ""

    @property
    def is_working(self) -> bool:
        """Whether :meth:`advance` has something to do or to tell."""
        return bool(
            self._generating or self._opening or self._acting or self._grading or self._ended
        )

    def has_room(self, most: int) -> bool:
        """Return whether the engine could work on another question at once.

        What waits for a tool leaves its place to others, but returns: so there is a limit, for a
        question that is taken early is one that no other rank can take later.

        Args:
            most: rollouts on their way beyond which there is no room in any case.
        """
        places = self.engine.max_num_seqs
        num_generating = len(self._generating)
        num_running = num_generating + len(self._opening) + len(self._acting)
        return num_generating < places and num_running < min(most, _SURPLUS * places)

    def start(
        self, position: int, question: Question, index: int, stream: str, prompt: Sequence[int]
    ) -> None:
        """Begin a rollout.

        Args:
            position: position of the question among those of the phase.
            question: what is asked.
            index: position of the rollout in its group.
            stream: names its random numbers.
            prompt: token ids of the prompt.
        """
        session = self.toolbox.session(question)
        self._count(total=1)
        record, started = prompt_record(prompt), time.monotonic()
        trajectory = Trajectory(position, question, index, stream, 0, session, record, started)
        trajectory.number = self.counts.total
        self._begin(trajectory)

    def advance(self) -> list[tuple[int, Rollout]]:
        """Make one step of the engine and take in the results and grades that are there.

        Returns:
            Position of the question and rollout, for each rollout that ended.

        Raises:
            RolloutError: if the engine loses requests.
        """
        if self._generating:
            if not self.engine.has_unfinished():
                raise RolloutError(
                    f"Expected the engine to work on {len(self._generating)} requests, got an "
                    "idle engine. It dropped them; look at its log."
                )
            for completion in self.engine.step():
                self._on_completion(completion)
        if self._acting or self._opening:
            # While the engine has work it is not kept waiting: fast tools make the next step.
            wait_s = 0.0 if self._generating else _IDLE_WAIT_S
            for outcome in self.tools.poll(wait_s):
                self._on_tool(outcome)
        if self._grading:
            # Nothing else waits for a grade, so it comes last.
            waits = self._generating or self._acting or self._opening
            wait_s = 0.0 if waits else _IDLE_WAIT_S
            for graded in self.grader.poll(wait_s):
                self._on_grade(graded)
        self._end_late()
        ended, self._ended = self._ended, []
        return ended

    def require_any(self) -> None:
        """Refuse a phase of which nothing can be used.

        Raises:
            RolloutError: if rollouts were started and none that ended counts.
        """
        if self.counts.total and not self._any_counts:
            raise RolloutError(
                f"Expected rollouts, but all {self.counts.total} failed; the last failure was "
                f"{self._last_failure}. Mend that tool or reward or check its service; if it was "
                "too slow, raise `limits.tool_timeout_s`, `limits.reward_timeout_s` or "
                "`limits.max_seconds`."
            )

    def cancel(self) -> None:
        """Forget every rollout that has not ended, also in the engine and on the threads."""
        self.engine.cancel(list(self._generating))
        self.tools.cancel([*self._acting, *self._opening])
        self.grader.cancel(list(self._grading))
        cancelled = [*self._generating.values(), *self._opening.values()]
        cancelled += [trajectory for trajectory, *_ in self._acting.values()]
        for trajectory in cancelled:
            self._close(trajectory)
        self._closer.wait()
        self._generating.clear()
        self._opening.clear()
        self._acting.clear()
        self._grading.clear()

    def _begin(self, trajectory: Trajectory) -> None:
        """Open the tools if they have to be, then ask for the first response."""
        if not trajectory.session.has_opening:
            self._generate(trajectory)
            return
        key = f"open-{next(_NUMBERS)}"
        self._opening[key] = trajectory
        self.tools.submit(key, partial(_open, trajectory.session))

    def _generate(self, trajectory: Trajectory) -> None:
        """Ask the engine for the next response, if there is room for one."""
        max_tokens = self.rules.open_response(trajectory)
        if max_tokens == 0:
            self._finish(trajectory, Finish(StopReason.MAX_TOKENS))
            return
        request_id = f"request-{next(_NUMBERS)}"
        trajectory.num_requests += 1
        self._generating[request_id] = trajectory
        self.engine.submit(
            GenerationRequest(
                request_id,
                tuple(trajectory.record.token_ids),
                max_tokens,
                self.rules.template.stop_ids,
                stream=f"{trajectory.stream}/{trajectory.num_requests}",
                priority=trajectory.number,
            )
        )

    def _on_completion(self, completion: Completion) -> None:
        """Take a response in and do what it asks for."""
        trajectory = self._generating.pop(completion.request_id, None)
        if trajectory is None:
            return
        self._count(tokens=len(completion.token_ids))
        trajectory.record.experts = completion.experts
        decision = self.rules.read(trajectory, completion)
        if isinstance(decision, Finish):
            self._finish(trajectory, decision)
        elif isinstance(decision, Reject):
            self._observe(trajectory, ToolCall("", {}), ToolResult(decision.error, error="parse"))
        else:
            call, session = decision.call, trajectory.session
            self._acting[completion.request_id] = (trajectory, call, decision.note)
            self.tools.submit(
                completion.request_id, lambda: require_result(session.call(call), call.name)
            )

    def _on_tool(self, outcome: CallOutcome[ToolResult]) -> None:
        """Take a tool's result in, or begin the rollout anew if the tool's service failed."""
        if outcome.key in self._opening:
            trajectory = self._opening.pop(outcome.key)
            if outcome.result is None:
                self._restart(trajectory, "the opening of the tools", outcome.failure)
                return
            if said := clean_text(outcome.result.text):
                opening = f"\n\n{said}"
                prompt = self.prompt_with(trajectory.question, opening)
                trajectory.record = prompt_record(prompt, opening)
            self._generate(trajectory)
        elif outcome.key in self._acting:
            trajectory, call, note = self._acting.pop(outcome.key)
            if outcome.result is None:
                self._restart(trajectory, f"tool '{call.name}'", outcome.failure)
                return
            result = replace(outcome.result, text=note + outcome.result.text)
            self._observe(trajectory, call, result)

    def _restart(self, trajectory: Trajectory, what: str, failure: str | None) -> None:
        """Begin a rollout anew with fresh tools, once; then leave it out."""
        self._count(tool_errors=1)
        self._last_failure = f"{what} in rollout {trajectory.id}: {clean_text(str(failure))}"
        logger.warning("Infrastructure failure of %s", self._last_failure)
        if trajectory.attempt + 1 >= _MAX_ATTEMPTS:
            self._finish(trajectory, Finish(StopReason.INFRASTRUCTURE))
            return
        self._close(trajectory)
        trajectory.attempt += 1
        record = trajectory.record
        trajectory.record = prompt_record(record.token_ids[: record.prompt_length], record.opening)
        trajectory.session = self.toolbox.session(trajectory.question)
        trajectory.is_closed = False
        trajectory.consecutive_errors = 0
        self._begin(trajectory)

    def _observe(self, trajectory: Trajectory, call: ToolCall, result: ToolResult) -> None:
        """Give an observation to a rollout and let it go on."""
        reason = self.rules.observe(trajectory, call, result)
        if reason is StopReason.MAX_TOKENS:  # the observation did not fit, so there was no turn
            self._finish(trajectory, Finish(reason))
            return
        if result.error is not None:
            self._count(tool_errors=1)
        if reason is None:
            self._generate(trajectory)
        else:
            self._finish(trajectory, Finish(reason))

    def _finish(self, trajectory: Trajectory, end: Finish) -> None:
        """End a rollout, once it is graded if it counts."""
        self._close(trajectory)
        if not end.reason.counts:
            self._end(trajectory, end, _NO_GRADE)
            return
        key = f"grade-{next(_NUMBERS)}"
        self._grading[key] = (trajectory, end)
        turns = tuple(trajectory.record.turns)
        self.grader.grade(key, trajectory.question, end.answer, turns)

    def _on_grade(self, outcome: CallOutcome[object]) -> None:
        """Take a grade in, or leave the rollout out if there is none."""
        trajectory, end = self._grading.pop(outcome.key)
        reward = self.grader.name
        if outcome.failure is None:
            self._end(trajectory, end, require_grade(outcome.result, reward, trajectory.id))
            return
        self._count(reward_failures=1)
        failure = clean_text(outcome.failure)
        self._last_failure = f"reward '{reward}' for rollout {trajectory.id}: {failure}"
        logger.warning("Left out, failure of %s", self._last_failure)
        self._end(trajectory, Finish(StopReason.REWARD_FAILURE, end.answer), _NO_GRADE)

    def _end(self, trajectory: Trajectory, end: Finish, grade: Grade) -> None:
        """Freeze a rollout."""
        rollout = trajectory.record.finish(
            trajectory.question, trajectory.index, end.reason, end.answer, grade, self._version
        )
        self._ended.append((trajectory.position, rollout))
        self._any_counts |= end.reason.counts
        self._count(finished=1, turns=rollout.num_turns)

    def _end_late(self) -> None:
        """End the rollouts whose time is over; what they wait for is cancelled."""
        limit_s = self.rules.limits.max_seconds
        if limit_s is None:
            return
        begin = time.monotonic() - limit_s
        generating = [key for key, t in self._generating.items() if t.started < begin]
        opening = [key for key, t in self._opening.items() if t.started < begin]
        acting = [key for key, (t, *_) in self._acting.items() if t.started < begin]
        grading = [key for key, (t, _) in self._grading.items() if t.started < begin]
        self.engine.cancel(generating)
        self.tools.cancel([*opening, *acting])
        self.grader.cancel(grading)
        late = [self._generating.pop(key) for key in generating]
        late += [self._opening.pop(key) for key in opening]
        late += [self._acting.pop(key)[0] for key in acting]
        late += [self._grading.pop(key)[0] for key in grading]
        for trajectory in late:
            self._last_failure = f"rollout {trajectory.id} beyond {limit_s:g} s"
            logger.warning("Left out: %s", self._last_failure)
            self._finish(trajectory, Finish(StopReason.DEADLINE))

    def _close(self, trajectory: Trajectory) -> None:
        """Close the tools of a rollout, once."""
        if not trajectory.is_closed:
            trajectory.is_closed = True
            self._closer.close(trajectory.session)

    def _count(self, **more: int) -> None:
        values = {name: getattr(self.counts, name) + number for name, number in more.items()}
        self.counts = replace(self.counts, **values)


def _open(session: ToolSession) -> ToolResult:
    """Open a session on the thread that runs calls; what it says comes back as a result's text."""
    return ToolResult(str(session.open()))
