"""Calls of foreign code on threads, each with a timeout and a bounded number of retries."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from trace_pl.errors import with_place

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CallOutcome(Generic[T]):
    """How a call ended."""

    key: str
    result: T | None
    failure: str | None
    """Why there is no result, after all retries; None if there is one."""


@dataclass(eq=False, slots=True)
class _Attempt(Generic[T]):
    key: str
    function: Callable[[], T]
    number: int
    started: float | None = None
    is_abandoned: bool = False
    """Whether its thread was replaced."""
    is_cancelled: bool = False
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class _Report(Generic[T]):
    attempt: _Attempt[T]
    result: T | None
    failure: str | None


class CallRunner(Generic[T]):
    """Runs calls concurrently and never waits for one that hangs.

    A thread cannot be stopped from outside, so a call beyond its time is abandoned: its thread is
    replaced and whatever it returns later is dropped. Threads are daemons, so that a hung call does
    not keep the program from ending.

    Args:
        num_threads: calls that run at the same time.
        timeout_s: seconds one attempt may take, counted from when it starts to run.
        num_retries: further attempts after a failed one.
    """

    def __init__(self, num_threads: int, timeout_s: float, num_retries: int) -> None:
        self.num_threads = num_threads
        self.timeout_s = timeout_s
        self.num_retries = num_retries
        self._num_started = 0
        self._tasks: queue.SimpleQueue[_Attempt[T] | None] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[_Report[T]] = queue.SimpleQueue()
        self._pending: dict[str, _Attempt[T]] = {}

    @property
    def num_pending(self) -> int:
        """Calls without an outcome."""
        return len(self._pending)

    def submit(self, key: str, function: Callable[[], T]) -> None:
        """Start a call.

        Args:
            key: name of the call, unique among pending ones.
            function: makes the call; it may still run when it is retried after a timeout.
        """
        assert key not in self._pending, "keys of pending calls are unique"
        if self._num_started < self.num_threads:
            self._start_thread()
        self._start_attempt(_Attempt(key, function, number=0))

    def poll(self, wait_s: float) -> list[CallOutcome[T]]:
        """Return the outcomes that are in, waiting up to ``wait_s`` seconds for the first."""
        outcomes = [
            outcome
            for report in self._reports_within(wait_s)
            # A late report belongs to an attempt that is no longer the pending one.
            if self._pending.get(report.attempt.key) is report.attempt
            and (outcome := self._settle(report)) is not None
        ]
        return outcomes + self._expire()

    def cancel(self, keys: Iterable[str]) -> None:
        """Forget calls: what has not begun is not run, what comes back late is dropped."""
        attempts = [self._pending.pop(key) for key in keys if key in self._pending]
        for attempt in attempts:
            attempt.is_cancelled = True
        for attempt in attempts:
            if attempt.started is not None and not attempt.is_done:
                self._abandon(attempt)

    def close(self) -> None:
        """Forget pending calls and let threads end."""
        for attempt in self._pending.values():
            attempt.is_cancelled = True
        self._pending.clear()
        for _ in range(self._num_started):
            self._tasks.put(None)
        self._num_started = 0

    def _reports_within(self, wait_s: float) -> list[_Report[T]]:
        reports: list[_Report[T]] = []
        try:
            if wait_s > 0.0 and self._pending:
                reports.append(self._reports.get(timeout=wait_s))
            while True:
                reports.append(self._reports.get_nowait())
        except queue.Empty:
            return reports

    def _settle(self, report: _Report[T]) -> CallOutcome[T] | None:
        """Turn a report into an outcome, or into a further attempt."""
        attempt = report.attempt
        if report.failure is not None and attempt.number < self.num_retries:
            self._start_attempt(_Attempt(attempt.key, attempt.function, attempt.number + 1))
            return None
        del self._pending[attempt.key]
        return CallOutcome(attempt.key, report.result, report.failure)

    def _expire(self) -> list[CallOutcome[T]]:
        now = time.monotonic()
        late = [
            attempt
            for attempt in self._pending.values()
            if attempt.started is not None and now - attempt.started > self.timeout_s
        ]
        outcomes = []
        for attempt in late:
            self._abandon(attempt)
            failure = f"no result within {self.timeout_s:g} s"
            outcome = self._settle(_Report(attempt, None, failure))
            if outcome is not None:
                outcomes.append(outcome)
        return outcomes

    def _abandon(self, attempt: _Attempt[T]) -> None:
        attempt.is_abandoned = True
        self._start_thread()
        self._num_started -= 1  # it replaces the busy one, which ends after its call

    def _start_attempt(self, attempt: _Attempt[T]) -> None:
        self._pending[attempt.key] = attempt
        self._tasks.put(attempt)

    def _start_thread(self) -> None:
        self._num_started += 1
        threading.Thread(target=self._work, name="trace-call", daemon=True).start()

    def _work(self) -> None:
        while (attempt := self._tasks.get()) is not None:
            if attempt.is_cancelled:
                continue
            attempt.started = time.monotonic()
            try:
                report = _Report(attempt, attempt.function(), None)
            # It is foreign code: whatever it raises ends this call, not the other rollouts.
            except Exception as error:
                report = _Report(attempt, None, with_place(error))
            attempt.is_done = True
            self._reports.put(report)
            if attempt.is_abandoned:
                return
