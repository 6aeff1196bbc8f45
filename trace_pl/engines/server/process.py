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

import torch

from trace_pl.distributed.leader import has_other_ranks
from trace_pl.engines.server.main import STOP_WITH_STDIN

_CLOSE_S = 15.0
_OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""What tells the trainer which of several ranks it is; the server is none of them."""
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
        inherited = {k: v for k, v in os.environ.items() if k not in _OF_RANKS}
        environment = {"VLLM_LOGGING_LEVEL": "ERROR", **inherited}
        environment |= {"OMP_NUM_THREADS": str(num_threads)}
        if has_other_ranks() and torch.cuda.is_available():
            # Each rank's child takes the rank's own device, which is the only one that it sees.
            seen = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
            index = torch.cuda.current_device()
            environment["CUDA_VISIBLE_DEVICES"] = seen[index] if any(seen) else str(index)
        command = [sys.executable, "-m", "trace_pl.engines.server.main", STOP_WITH_STDIN]
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
