"""The life of a server that is a child of this process: started, watched, started once more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trace_pl.engines.server.client import ServerClient
from trace_pl.engines.server.group import ServerGroup
from trace_pl.engines.server.process import ServerProcess
from trace_pl.errors import ConfigError, ServerError

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_DEATH_S = 30.0  # vLLM's server looks every 5 s whether its engine has died, and then ends


class ChildServer:
    """Keeps one server alive.

    A server that has died may be started anew once after each push of weights: one death may be an
    accident, and a second one is told.

    Args:
        arguments: those of `vllm serve`, without an address.
        num_threads: CPU threads of the server.
        folder: folder of weights on their way; the child removes it if this process is killed.
        make_client: given the path of a socket, makes the client.
        make_group: makes the group of one that is pushed to.
        start_timeout_s: longest start.

    Raises:
        ConfigError: if it does not start.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        num_threads: int,
        folder: Path,
        make_client: Callable[[Path], ServerClient],
        make_group: Callable[[ServerClient], ServerGroup],
        start_timeout_s: float,
    ) -> None:
        self._arguments = arguments
        self._num_threads = num_threads
        self._folder = folder
        self._make_client = make_client
        self._make_group = make_group
        self._start_timeout_s = start_timeout_s
        self._may_restart = True
        self._start()

    def _start(self) -> None:
        self.process = ServerProcess(self._arguments, self._num_threads, [self._folder])
        self.group = self._make_group(self._make_client(self.process.socket))
        deadline = time.monotonic() + self._start_timeout_s
        while not self.group.is_healthy():
            if self.process.has_exited(_POLL_S) or time.monotonic() > deadline:
                log = self.process.log_end()
                self.close()
                raise ConfigError(
                    "Expected vLLM's server to start, got the log below. Change "
                    f"`data.engine.init_args`.\n{log}"
                )

    def forgive(self) -> None:
        """Allow one more start; whoever calls this pushes new weights."""
        self._may_restart = True

    def has_died(self) -> bool:
        """Return whether the process has ended, or ends while vLLM notices what broke."""
        return not self.group.is_healthy() and self.process.has_exited(_DEATH_S)

    def restart(self, error: ServerError, obstacle: str = "") -> None:
        """Start a server that has died anew.

        Args:
            error: what was noticed of its death.
            obstacle: why it cannot go on where it was; empty if it can.

        Raises:
            ServerError: the same if the server lives; that it died, if it may not be started.
        """
        if not self.has_died():
            raise error
        log = self.process.log_end()
        obstacle = obstacle or ("" if self._may_restart else " a second time")
        if obstacle:
            raise ServerError(f"The vLLM server died{obstacle}. Its log ends:\n{log}") from error
        self._may_restart = False
        logger.warning("The vLLM server died and is started once more. Its log ends:\n%s", log)
        self.close()
        self._start()

    def close(self) -> None:
        """Close every connection and stop the process."""
        self.group.close()
        self.process.close()
