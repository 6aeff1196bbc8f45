"""Closing the sessions of rollouts that have ended."""

from __future__ import annotations

import logging
import threading
import time

from trace_pl.errors import with_place
from trace_pl.tools.protocol import ToolSession

logger = logging.getLogger(__name__)


class Closer:
    """Closes sessions beside the rollouts that go on, and waits for the last ones a while.

    Args:
        timeout_s: seconds that :meth:`wait` gives the sessions that are still closing.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._threads: list[threading.Thread] = []

    def close(self, session: ToolSession) -> None:
        """Begin to close a session, on a thread of its own: foreign code may hang."""
        if type(session).close is ToolSession.close:
            return
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=_close, args=(session,), name="trace-close", daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self) -> None:
        """Wait until all are closed, or warn of those that were not in time."""
        deadline = time.monotonic() + self.timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        num_open = sum(thread.is_alive() for thread in self._threads)
        if num_open:
            logger.warning("%d tool sessions were not closed in %g s.", num_open, self.timeout_s)
        self._threads.clear()


def _close(session: ToolSession) -> None:
    try:
        session.close()
    except Exception as error:  # it is foreign code, and nothing depends on it any more
        logger.warning("A tool session could not be closed: %s", with_place(error))
