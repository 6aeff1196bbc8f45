"""Starting several processes on this machine."""

import socket
import sys


def free_port():
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(num_ranks):
    """Return the beginning of a command that starts ranks of one process group."""
    return (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        f"--nproc-per-node={num_ranks}",
    )
