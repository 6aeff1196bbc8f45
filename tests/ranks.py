"""Starts the ranks of one process group on this machine, as `torch.distributed.run` does.

    python ranks.py NUMBER SCRIPT_OR_-m_MODULE [ARGUMENT...]

That one's agent sometimes never ends although all ranks have, which stops a test of what they did.
"""

import os
import subprocess
import sys
import time

from processes import free_port


def main(number, *command):
    """Return the exit status of the first rank that fails, the others being stopped, or 0."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": number}
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env={"OMP_NUM_THREADS": "1", **os.environ, **group, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in map(str, range(int(number)))
    ]
    try:
        while (statuses := [rank.poll() for rank in ranks]).count(0) < len(ranks):
            if failed := [status for status in statuses if status]:
                return failed[0]
            time.sleep(0.05)
        return 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
