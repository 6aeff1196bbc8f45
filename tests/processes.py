"""Real runs in processes of their own: how tests start them, wait for them and end them.

Half of what a short run costs is the import of torch, Lightning, transformers and vLLM. So the
processes of tests are forked from a server that has imported them once (Python's "forkserver");
what they run from there on is the program's own ``main``. What has to begin with an interpreter of
its own, such as the launch files, is started with :func:`popen`.

Nothing outlives its test, see ``conftest.py``, and nobody waits for longer than ``PATIENCE_S``.
"""

import atexit
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext, suppress
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

import forked_servers
from torch import distributed

PATIENCE_S = 600.0
"""For whatever takes a minute on a busy machine."""

_SERVER = multiprocessing.get_context("forkserver")
_STARTED = []


def start_server():
    """Start the server unless it runs."""
    _SERVER.set_forkserver_preload(["preloaded"])
    # Where Python 3.11's server looks for what it imports; what it does not find, it leaves out.
    folders = [str(Path(__file__).parent), *sys.path]
    with patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(filter(None, folders))}):
        forkserver.ensure_running()


class Run:
    """A function in a process of its own, which leads a group and a session.

    Args:
        target: called in the process; what it returns is the exit code.
        arguments: for the target.
        environment: set for the process beside what it inherits.
    """

    def __init__(self, target, *arguments, environment=None):
        with tempfile.NamedTemporaryFile(prefix="trace_pl-run-", delete=False) as log:
            self._log = Path(log.name)
        settings = {**os.environ, **(environment or {})}
        start_server()
        self._process = _SERVER.Process(
            target=_run, args=(str(self._log), settings, target, arguments)
        )
        self._process.start()
        self.pid = self._process.pid
        _STARTED.append(self)

    def poll(self):
        """Return the exit code, None while it runs."""
        return self._process.exitcode

    def wait(self):
        """Wait for the end and return the exit code.

        Raises:
            TimeoutError: with the output, if that takes too long; the process is killed.
        """
        self._process.join(PATIENCE_S)
        if self.poll() is None:
            self.kill()
            raise TimeoutError(self.output()[-3000:])
        return self.poll()

    def output(self):
        """Return what it wrote so far, on stdout and stderr."""
        return self._log.read_text(errors="replace")

    def finish(self, code=0):
        """Wait for the end, which has to be of this exit code, and return the output."""
        assert self.wait() == code, self.output()[-4000:]
        return self.output()

    def wait_for(self, condition):
        """Wait until ``condition()`` holds, which has to be before the process ends."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.poll() is None, self.output()[-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def send_signal(self, number):
        """Send a signal to the process itself."""
        os.kill(self.pid, number)

    def kill(self):
        """Kill the process and all others of its session."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()

    def close(self):
        """Kill what still runs, and remove the log."""
        self.kill()
        self._log.unlink(missing_ok=True)


def _run(log, environment, target, arguments):
    """Be a process of :class:`Run`."""
    assert "preloaded" in sys.modules, "the server of processes has not imported anything"
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.exit(become(environment, target, *arguments))


def become(environment, target, *arguments):
    """Turn a fork into what a shell would have started, and return its exit code."""
    os.setsid()
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(environment)
    # Whoever starts the tests with nohup, or in the background of a script, has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    address = environment.get(forked_servers.ADDRESS)
    try:
        with forked_servers.instead_of_interpreters(address) if address else nullcontext():
            code = target(*arguments) or 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()  # multiprocessing leaves them out
    return code


def command_line(*arguments):
    """Run the command line in this process."""
    from trace_pl.commands.main import main

    sys.argv = ["trace-pl", *map(str, arguments)]
    return main()


def run_script(text, *arguments):
    """Run a script in this process, as ``python -c`` does."""
    sys.argv = ["-c", *arguments]
    exec(text, {"__name__": "__main__"})


def start(*arguments, environment=None):
    """Start ``trace-pl ARGUMENTS``."""
    return Run(command_line, *arguments, environment=environment)


def run(*arguments):
    """Run ``trace-pl ARGUMENTS`` to its good end and return its output."""
    return start(*arguments).finish()


class Ranks:
    """Processes of one group, as torchrun would start them on one machine.

    Args:
        num_ranks: how many.
        target: called in each of them.
        arguments: for the target.
    """

    def __init__(self, num_ranks, target, *arguments):
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "tests",
        }
        self.ranks = [
            Run(
                target,
                *arguments,
                environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(num_ranks)
        ]

    def finish(self):
        """Wait for the good end of all, and return the output of the first."""
        waiting = list(self.ranks)
        deadline = time.monotonic() + PATIENCE_S
        while waiting:
            for rank in waiting:
                assert rank.poll() in (None, 0), rank.output()[-4000:]
            assert time.monotonic() < deadline, waiting[0].output()[-4000:]
            waiting = [rank for rank in waiting if rank.poll() is None]
            time.sleep(0.02)
        return self.ranks[0].output()


def popen(command, **settings):
    """Start a program that leads a session, as ``subprocess.Popen`` does; it ends with its test."""
    process = subprocess.Popen(list(map(str, command)), start_new_session=True, **settings)
    _STARTED.append(process)
    return process


def started():
    """Return how many processes tests have started so far."""
    return len(_STARTED)


def end_all(since=0):
    """Kill what was started after the first ``since`` processes, and whatever they started."""
    while len(_STARTED) > since:
        process = _STARTED.pop()
        if isinstance(process, Run):
            process.close()
            continue
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port():
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def leave():
    """End a rank that is done, without taking Python down around gloo's threads.

    A thread of gloo keeps its last piece of work, and with it Python objects such as the modes that
    were on, until the process group goes. If that is when Python ends, it aborts the process; if
    Python's lock is held meanwhile, as by DDP's reducer, it waits forever (torch 2.13).
    """
    distributed.barrier()  # nobody goes while another still listens
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
