"""Requests on their way, and the answers that have come back."""

from __future__ import annotations

import queue
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import suppress

from trace_pl.engines.protocol import GenerationRequest
from trace_pl.engines.server.client import Json

Answer = Future[Json]


class PendingRequests:
    """Knows every request that was sent and not cancelled until its answer is taken."""

    def __init__(self) -> None:
        self._sent: dict[Answer, GenerationRequest] = {}
        self._arrived: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def __len__(self) -> int:
        """Return how many answers are missing or not taken."""
        return len(self._sent)

    def add(self, request: GenerationRequest, answer: Answer) -> None:
        """Remember a request that was sent."""
        self._sent[answer] = request
        answer.add_done_callback(self._arrived.put)

    def arrived(self, wait_s: float) -> list[tuple[GenerationRequest, Answer]]:
        """Return what has an answer, waiting up to ``wait_s`` seconds for the first."""
        answers = []
        with suppress(queue.Empty):
            answers.append(self._arrived.get(timeout=wait_s))
            while True:
                answers.append(self._arrived.get_nowait())
        return [(self._sent[answer], answer) for answer in answers if answer in self._sent]

    def remove(self, answer: Answer) -> None:
        """Forget a request whose answer was read."""
        del self._sent[answer]

    def cancel(self, request_ids: Collection[str]) -> None:
        """Forget requests; vLLM ends one whose connection closes."""
        wanted = set(request_ids)
        for answer, request in list(self._sent.items()):
            if request.request_id in wanted:
                del self._sent[answer]
                answer.cancel()

    def drop(self) -> list[GenerationRequest]:
        """Forget all of them, and return them."""
        dropped = list(self._sent.values())
        for answer in self._sent:
            answer.cancel()
        self._sent.clear()
        return dropped
