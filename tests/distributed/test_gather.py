import os
import subprocess
from pathlib import Path

import torch
from processes import torchrun

from trace_pl.distributed.gather import full_tensors

TESTS = Path(__file__).parents[1]


def test_two_ranks_gather_ragged_packed_and_adapted_weights():
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*torchrun(2), str(Path(__file__).with_name("gather_ranks.py"))],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_tensor_that_is_not_sharded_is_not_copied():
    tensor = torch.ones(3)
    ((name, found),) = full_tensors([("a", tensor)])
    assert name == "a"
    assert found is tensor
