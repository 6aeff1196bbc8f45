"""Rollouts from the policy's newest weights, now or in a thread beside the training."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from threading import Event
from typing import Any

from trace_pl.distributed.question_queue import QuestionQueue
from trace_pl.errors import RolloutError
from trace_pl.rollout.agent import AgentLoop
from trace_pl.rollout.parity import PROMPT, ParityReport, check_parity
from trace_pl.rollout.progress import RolloutBar, RolloutCounts
from trace_pl.types import Question, RolloutGroup

Groups = dict[int, RolloutGroup]


class Collector:
    """Keeps one engine on the policy's weights and collects groups with it, one phase at a time.

    Args:
        loop: the agent loop.
        parity_tolerance: largest allowed difference between engine and trainer, in nats; None
            derives limits, see :func:`check_parity`.
    """

    def __init__(self, loop: AgentLoop, parity_tolerance: float | None) -> None:
        self.loop = loop
        self.parity_tolerance = parity_tolerance
        self.parity: ParityReport | None = None
        """How far engine and trainer were apart after the last push."""
        self._threads = ThreadPoolExecutor(1, "rollouts")
        self._ahead: Future[Groups] | None = None
        self._stop = Event()

    def push_weights(self, module: Any) -> None:  # noqa: ANN401  (a TraceModule, which needs this)
        """Copy the policy into the engine and prove that both agree.

        Raises:
            WeightSyncError: if log-probs of a fixed prompt differ beyond the limits.
        """
        self.wait()
        engine = self.loop.engine
        if engine.version == module.policy_version:
            return
        weights = module.policy_tensors(engine.weight_dtype)
        engine.push_weights(weights, version=module.policy_version)
        prompt = self.loop.template.prompt_ids(self.loop.system_prompt, PROMPT)
        prompt = prompt[: engine.max_model_len - 1]  # the engine adds a token to what it reads
        self.parity = check_parity(engine, module.policy, prompt, self.parity_tolerance)

    def collect(
        self, questions: Sequence[Question], group_size: int, what: str, enough: int | None = None
    ) -> Groups:
        """Sample ``group_size`` rollouts of each question with the weights that the engine has.

        Ranks call this together and share the questions: each takes the next as it has room.

        Args:
            questions: what to ask, the same on all ranks.
            group_size: rollouts of each question (G).
            what: goes before the progress bar.
            enough: groups with a rollout, of all ranks together, after which the others are
                cancelled; None waits for all.

        Returns:
            Groups of this rank by position of their question, in this order.
        """
        self.wait()
        queue = QuestionQueue.of_all_ranks(len(questions), enough)
        return self._collect(questions, group_size, what, queue)

    def start(self, questions: Sequence[Question], group_size: int) -> None:
        """Begin to collect in a thread; :meth:`finish` returns what came of it."""
        assert self._ahead is None, "one phase at a time"
        queue = QuestionQueue.of_all_ranks(len(questions))
        self._ahead = self._threads.submit(self._collect, questions, group_size, "ahead", queue)

    @property
    def is_ahead(self) -> bool:
        """Whether a phase was started and not asked for yet."""
        return self._ahead is not None

    def finish(self) -> Groups:
        """Return the groups of the phase that was started, when all of it is there."""
        assert self._ahead is not None, "start() comes first"
        ahead, self._ahead = self._ahead, None
        return ahead.result()

    def wait(self) -> None:
        """Wait until the engine is free; what was started stays to be asked for."""
        if self._ahead is not None:
            self._ahead.exception()

    def close(self) -> None:
        """End the phase that is running, then the engine."""
        self._stop.set()
        self._threads.shutdown()
        self.loop.engine.close()

    def _collect(
        self, questions: Sequence[Question], group_size: int, what: str, queue: QuestionQueue
    ) -> Groups:
        groups: Groups = {}

        with RolloutBar(what) as bar:

            def show(counts: RolloutCounts) -> None:
                if self._stop.is_set():
                    raise RolloutError("Expected to collect rollouts, got the end of the run.")
                bar.show(counts)

            with closing(self.loop.stream(questions, group_size, show, queue)) as stream:
                for position, group in stream:
                    if not group.rollouts or queue.count():
                        groups[position] = group
        queue.close()
        self.loop.engine.sleep()
        return dict(sorted(groups.items()))
