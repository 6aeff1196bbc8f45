"""Exports in a process of its own, and says how much memory that no file backs it took at most.

    python tests/anonymous_memory.py '[["CHECKPOINT", "OUTPUT", "--dtype=bfloat16"], ...]'

The last line is a number of MiB beyond what the imports took, of all exports together.
"""

import json
import sys
import threading
from pathlib import Path

import peft  # noqa: F401  (imported before the first number is taken)
import torch

import trace_pl.training.export  # noqa: F401  (the command imports it when it runs)
from trace_pl.commands.export import command


def anonymous_mib():
    """Memory of this process without the pages of mapped files, which the system can take back."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def main(exports):
    torch.set_num_threads(1)
    start = anonymous_mib()
    peak, is_over = start, threading.Event()

    def watch():
        nonlocal peak
        while not is_over.wait(0.002):
            peak = max(peak, anonymous_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for arguments in json.loads(exports):
        command(arguments)
        print(f"{peak - start:.0f}", arguments, file=sys.stderr)
    is_over.set()
    watcher.join()
    print(f"{peak - start:.0f}")


if __name__ == "__main__":
    main(sys.argv[1])
