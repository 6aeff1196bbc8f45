"""Starts vLLM's servers as forks of a process that has imported vLLM, which is most of a start.

It stands where trace_pl starts a server with ``subprocess``. What runs from there on is the
server's own ``__main__``; ``test_server_engine.py`` also starts servers with interpreters of their
own.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from trace_pl.engines.server import process

ADDRESS = "TRACE_PL_TESTS_SERVERS"
"""Variable of the environment that names the socket of :func:`serve`."""
MODULE = "trace_pl.engines.server.main"
_MOST_BYTES = 2**17


class ForkedServer:
    """What trace_pl needs of ``subprocess.Popen``.

    Args:
        command: an interpreter, ``-m``, the server's module and its arguments.
        env: of the server.
        stdout: file of what it prints.
        settings: what holds for every server.
    """

    def __init__(self, command, env, stdout, **settings):
        assert command[1:3] == ["-m", MODULE]
        expected = {"stdin": subprocess.PIPE, "stderr": subprocess.STDOUT}
        assert settings == {**expected, "start_new_session": True}
        self.args = command
        self.returncode = None
        read, write = os.pipe()
        self.stdin = os.fdopen(write, "wb")
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.connect(os.environ[ADDRESS])
        message = json.dumps([list(map(str, command[3:])), env]).encode()
        socket.send_fds(self._line, [message], [read, stdout.fileno()])
        os.close(read)
        self.pid = int(self._line.recv(_MOST_BYTES))

    def wait(self, timeout=None):
        """Return the exit code."""
        if self.returncode is None:
            self._line.settimeout(max(timeout, 1e-6) if timeout is not None else None)
            try:
                self.returncode = int(self._line.recv(_MOST_BYTES))
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.args, timeout) from None
            self._line.close()
        return self.returncode


@contextmanager
def instead_of_interpreters(address):
    """Let trace_pl start its servers at an address of :func:`serve`, in ranks of this one too."""
    known = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedServer})
    with (
        patch.dict(os.environ, {ADDRESS: str(address)}),
        patch.object(process, "subprocess", known),
    ):
        yield


def serve(address):
    """Fork a server for whoever connects, and tell its process id and in the end its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the go-betweens
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        while True:
            line, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _watch_server(line)
            line.close()


def _watch_server(line):
    """Be the parent of one server."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, (stdin, stdout), _, _ = socket.recv_fds(line, _MOST_BYTES, 2)
    pid = os.fork()
    if pid == 0:
        line.close()
        _become_server(*json.loads(message), stdin, stdout)
    os.close(stdin)  # whose end the server waits for
    line.send(str(pid).encode())
    _, status = os.waitpid(pid, 0)
    line.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become_server(arguments, environment, stdin, stdout):
    from processes import become

    for number, file in enumerate((stdin, stdout, stdout)):
        os.dup2(file, number)
    sys.stdin = os.fdopen(0)
    os._exit(become(environment, _main, arguments))


def _main(arguments):
    sys.argv = [MODULE, *arguments]
    runpy.run_module(MODULE, run_name="__main__")
