"""How long the phases of a step take in a real run; shared by the benchmarks that ask for it."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
PHASES = ("rollout", "credit", "update")


def run_phases(folder: Path, settings: Mapping[str, object], threads: int) -> dict[str, float]:
    """Train with the quickstart's settings and some others, in a process of its own.

    Args:
        folder: Where the run is put.
        settings: Dotted names and values on top of the quickstart's; evaluation is off.
        threads: CPU threads.

    Returns:
        Mean seconds of each phase, and ``tokens``, the mean of a rollout; the first epoch is left
        out.
    """
    all_settings = {
        "trainer.limit_val_batches": 0,
        "trainer.num_sanity_val_steps": 0,
        "trainer.enable_progress_bar": "false",
        "trainer.logger.init_args.save_dir": folder,
        "trainer.logger.init_args.version": "phases",
        **settings,
    }
    overrides = [f"--{name}={value}" for name, value in all_settings.items()]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "trace_pl",
            "fit",
            "--config",
            str(QUICKSTART),
            *overrides,
        ],
        check=True,
        stdout=sys.stderr,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )
    events = EventAccumulator(str(folder / "quickstart" / "phases"))
    events.Reload()
    tags = {**{phase: f"time/{phase}_s" for phase in PHASES}, "tokens": "rollout/tokens"}
    return {
        name: statistics.fmean(event.value for event in events.Scalars(tag)[1:])
        for name, tag in tags.items()
    }
