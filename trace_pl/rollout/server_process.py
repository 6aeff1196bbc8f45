"""A vLLM server of our own: started as a child, gone with the trainer, its log kept for errors."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trace_pl.rollout.vllm_server import STOP_WITH_STDIN

_CLOSE_S = 15.0
_NOISE = re.compile("nanobind|leaked (instance|type|function)|skipped remainder")
"""What libraries print at the end of every process, after whatever ended it."""


class ServerProcess:
    """A child process that serves vLLM on a Unix socket, which no other user can reach.

    Args:
        arguments: those of `vllm serve`, without an address.
        num_threads: CPU threads of the server.
        folders: removed by the child if the trainer is killed.
    """

    def __init__(self, arguments: Sequence[str], num_threads: int, folders: Sequence[Path]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="trace_pl-"))
        self.socket = self._folder / "http"
        """Where it listens."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the process)
        environment = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
        environment |= {"OMP_NUM_THREADS": str(num_threads)}
        command = [sys.executable, "-m", "trace_pl.rollout.vllm_server", STOP_WITH_STDIN]
        self._process = subprocess.Popen(
            [*command, *arguments, f"--uds={self.socket}"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own: it ends whole, and not by Ctrl-C
        )
        assert self._process.stdin is not None
        names = "".join(f"{folder}\n" for folder in [self._folder, *folders])
        self._process.stdin.write(names.encode())
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """Process id of the server, which is that of its process group."""
        return self._process.pid

    def has_exited(self, timeout_s: float = 0.0) -> bool:
        """Return whether the server ends within a time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def log_end(self, num_lines: int = 30) -> str:
        """Return the end of what the server printed."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join([line for line in lines if not _NOISE.search(line)][-num_lines:])

    def close(self) -> None:
        """Stop the server and everything that it started."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # the child's sign to end in good order
        self.has_exited(_CLOSE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._log.close()
