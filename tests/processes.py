"""Starting several processes on this machine, and ending them."""

import os
import socket
import sys

from torch import distributed


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


def leave():
    """End a rank that is done, without taking Python down around gloo's threads.

    A thread of gloo keeps its last piece of work, and with it Python objects such as the modes that
    were on, until the process group goes. If that is when Python ends, it aborts the process; if
    Python's lock is held meanwhile, as by DDP's reducer, it waits for ever (torch 2.13).
    """
    distributed.barrier()  # nobody goes while another still listens
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
