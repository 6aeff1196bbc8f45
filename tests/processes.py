"""Starting several processes on this machine."""

import socket
import sys
from pathlib import Path


def free_port():
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launcher(num_ranks):
    """Return the beginning of a command that starts ranks of one process group."""
    return (sys.executable, str(Path(__file__).with_name("ranks.py")), str(num_ranks))
