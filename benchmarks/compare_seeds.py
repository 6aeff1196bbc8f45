"""Success before and after of one config and its variants over several seeds, paired.

Runs `trace-pl fit` as a user would, `--jobs` at a time, and prints one JSON object: for each
variant the held-out success before and after with each seed, and the mean.

    python benchmarks/compare_seeds.py --seeds 0 1 2 --variant trace= \
        --variant grpo=configs/ablations/grpo.yaml
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean


def run(
    base: str, name: str, overlay: str, seed: int, runs: Path, threads: int
) -> dict[str, float]:
    """Train one variant with one seed, or read what an earlier call left."""
    folder = runs / name / f"seed_{seed}"
    if not (folder / "summary.json").is_file():
        command = [sys.executable, "-m", "trace_pl.cli", "fit", "--config", base]
        command += ["--config", overlay] if overlay else []
        command += [f"--seed_everything={seed}", f"--data.seed={seed}"]
        logger = "--trainer.logger.init_args"
        command += [f"{logger}.save_dir={runs}", f"{logger}.name={name}"]
        command += [f"{logger}.version=seed_{seed}"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        log = runs / f"{name}_{seed}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            subprocess.run(command, check=True, stdout=file, stderr=file, env=environment)
    summary: dict[str, float] = json.loads((folder / "summary.json").read_text())
    print(f"{name} seed {seed}: {summary['success_before']:.3f} -> {summary['success_after']:.3f}",
          file=sys.stderr)  # fmt: skip
    return summary


def main() -> None:
    """Parse arguments, run everything, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--variant", action="append", required=True, help="NAME=OVERLAY.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/compare_seeds"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each run")
    arguments = parser.parse_args()
    variants = dict(text.split("=", 1) for text in arguments.variant)
    # Seeds outermost: whatever was finished when a run is interrupted is paired.
    cases = list(product(arguments.seeds, variants))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        summaries = list(
            pool.map(
                lambda case: run(
                    arguments.config, case[1], variants[case[1]], case[0], arguments.runs,
                    arguments.threads,
                ),
                cases,
            )
        )  # fmt: skip
    found = {
        name: {
            key: [s[key] for (_, n), s in zip(cases, summaries, strict=True) if n == name]
            for key in ("success_before", "success_after", "tool_turns_after", "training_seconds")
        }
        for name in variants
    }
    after = {name: fmean(values["success_after"]) for name, values in found.items()}
    first, *others = after
    ratio = after[first] / after[others[0]] if others and after[others[0]] else None
    print(json.dumps({"name": "compare_seeds", "ratio": ratio, "mean_after": after, "runs": found}))


if __name__ == "__main__":
    main()
