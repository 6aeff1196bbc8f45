r"""Runs ablations on the built-in closed web over several seeds, paired, and compares them.

Each variant is the file of that name in configs/ablations or configs/methods ("trace" is no file:
the default). All variants of a seed share base model, random state and order of questions. Finished
runs are kept, so an interrupted call goes on where it stopped. Writes a table and a figure and
prints one JSON line.

    python benchmarks/credit_ablation.py --seeds 8 --first-seed 200 --jobs 2 --threads 1 \
        --variants grpo trace raw_delta linear_gap num_steps_1 shuffled

Success is that of held-out questions; all intervals are 95 % bootstrap intervals over seeds.
Seconds are those of rollout, credit and update; evaluation is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

from trace_pl.files import write_atomically

Array = NDArray[np.float64]
ROOT = Path(__file__).parents[1]
BASELINE = "grpo"
CONTROL = "shuffled"


@dataclass(frozen=True)
class Curve:
    """One run, at each evaluation."""

    updates: Array
    seconds: Array
    success: Array
    tool_turns: Array
    zero_variance: float
    """Mean share of groups without any outcome signal."""


def overlays(variant: str) -> list[Path]:
    """Return the file of a variant; "trace" has none.

    Raises:
        SystemExit: if no file has that name.
    """
    if variant == "trace":
        return []
    found = [ROOT / "configs" / room / f"{variant}.yaml" for room in ("ablations", "methods")]
    if not any(path.is_file() for path in found):
        raise SystemExit(f"Expected 'trace' or a file of configs/ablations or /methods: {variant}.")
    return [path for path in found if path.is_file()]


def train(arguments: argparse.Namespace, variant: str, seed: int) -> Path:
    """Train one variant with one seed unless that was done, and return the run's folder."""
    folder: Path = arguments.runs / variant / f"seed_{seed}"
    if (folder / "summary.json").is_file():
        return folder
    command = [sys.executable, "-m", "trace_pl", "fit"]
    configs = [*arguments.config, *map(str, overlays(variant))]
    command += [part for path in configs for part in ("--config", path)]
    command += [f"--seed_everything={seed}", f"--data.seed={seed}"]
    logger = "--trainer.logger.init_args"
    command += [f"{logger}.save_dir={arguments.runs}", f"{logger}.name={variant}"]
    command += [f"{logger}.version=seed_{seed}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    arguments.runs.mkdir(parents=True, exist_ok=True)
    with (arguments.runs / f"{variant}_{seed}.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log, env=environment)
    return folder


def read_curve(folder: Path) -> Curve:
    """Read the curve of a finished run from its TensorBoard files."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()

    def scalars(tag: str) -> tuple[Array, Array]:
        found = events.Scalars(tag)
        return np.array([e.step for e in found], float), np.array([e.value for e in found], float)

    steps, success = scalars("validation/success")
    _, tool_turns = scalars("validation/tool_turns")
    phases = [scalars(f"time/{name}_s") for name in ("rollout", "credit", "update")]
    epoch_ends, _ = phases[0]
    elapsed = np.cumsum(sum(values for _, values in phases))
    # Lightning logs step s after the update of that number; the first evaluation comes before any.
    updates = np.concatenate([[0.0], steps[1:] + 1.0])
    seconds = np.concatenate([[0.0], np.interp(steps[1:], epoch_ends, elapsed)])
    _, zero_variance = scalars("rollout/zero_variance_groups")
    return Curve(updates, seconds, success, tool_turns, float(zero_variance.mean()))


def interval(
    values: Sequence[float] | Array, statistic: Callable[[Array], float] = np.mean
) -> Array:
    """Return mean (or another statistic) and its 95 % bootstrap interval over seeds."""
    data = np.array(values)
    rng = np.random.default_rng(0)
    resampled = [statistic(rng.choice(data, len(data))) for _ in range(10_000)]
    return np.array([statistic(data), *np.percentile(resampled, [2.5, 97.5])])


def reached(curve: Curve, at: Array, threshold: float) -> float:
    """Return where the curve first reaches the threshold, infinity if it never does."""
    above = np.flatnonzero(curve.success >= threshold)
    if not len(above):
        return float("inf")
    i = int(above[0])
    if i == 0:
        return float(at[0])
    share = (threshold - curve.success[i - 1]) / (curve.success[i] - curve.success[i - 1])
    return float(at[i - 1] + share * (at[i] - at[i - 1]))


def areas(runs: Sequence[Curve]) -> Array:
    """Return the mean success of each run over its updates."""
    return np.array([np.trapezoid(c.success, c.updates) / c.updates[-1] for c in runs])


def compare(curves: dict[str, list[Curve]]) -> dict[str, dict[str, object]]:
    """Return the figures of every variant; differences are paired by seed."""
    base = curves[BASELINE]
    threshold = float(np.mean([c.success[-1] for c in base]))
    budget = min(float(np.mean([c.seconds[-1] for c in runs])) for runs in curves.values())
    found: dict[str, dict[str, object]] = {}
    for name, runs in curves.items():
        final = [c.success[-1] for c in runs]
        found[name] = {
            "success": interval(final).round(4).tolist(),
            "success_minus_grpo": interval(
                [a - b.success[-1] for a, b in zip(final, base, strict=True)]
            ).round(4).tolist(),
            "area": interval(areas(runs)).round(4).tolist(),
            "area_minus_grpo": interval(areas(runs) - areas(base)).round(4).tolist(),
            "area_minus_shuffled": interval(areas(runs) - areas(curves[CONTROL])).round(4).tolist()
            if CONTROL in curves
            else None,
            "success_at_equal_seconds": interval(
                [float(np.interp(budget, c.seconds, c.success)) for c in runs]
            ).round(4).tolist(),
            "median_updates_to_grpo": float(
                np.median([reached(c, c.updates, threshold) for c in runs])
            ),
            "median_seconds_to_grpo": float(
                np.median([reached(c, c.seconds, threshold) for c in runs])
            ),
            "seeds_that_reach_grpo": sum(bool(c.success.max() >= threshold) for c in runs),
            "tool_turns": np.mean([c.tool_turns for c in runs], axis=0).round(2).tolist(),
            "zero_variance_groups": round(float(np.mean([c.zero_variance for c in runs])), 3),
            "seeds": [round(float(s), 4) for s in final],
        }  # fmt: skip
    return found


def table(found: dict[str, dict[str, object]]) -> str:
    """Return the figures as Markdown."""

    def span(values: object) -> str:
        if values is None:
            return "-"
        mean, low, high = np.array(values) * 100.0
        return f"{mean:.1f} [{low:.1f}, {high:.1f}]"

    head = [
        "variant", "final success %", "minus GRPO", "area under curve %", "minus GRPO",
        "minus shuffled", "at equal seconds %", "updates to GRPO's final", "seconds", "reached",
        "tool turns", "groups without signal",
    ]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    for name, row in found.items():
        turns = np.array(row["tool_turns"])
        cells = [
            name, span(row["success"]), span(row["success_minus_grpo"]), span(row["area"]),
            span(row["area_minus_grpo"]), span(row["area_minus_shuffled"]),
            span(row["success_at_equal_seconds"]),
            f"{row['median_updates_to_grpo']:.1f}", f"{row['median_seconds_to_grpo']:.0f}",
            f"{row['seeds_that_reach_grpo']}/{len(np.array(row['seeds']))}",
            f"{turns[0]:.1f} to {turns[-1]:.1f}", f"{row['zero_variance_groups']:.2f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(curves: dict[str, list[Curve]]) -> Figure:
    """Return learning curves with bands: mean and 95 % interval over seeds."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, runs in curves.items():
        bands = np.array([interval(at) for at in np.array([c.success for c in runs]).T])
        axes.plot(runs[0].updates, bands[:, 0], label=name)
        axes.fill_between(runs[0].updates, bands[:, 1], bands[:, 2], alpha=0.15)
    axes.set(xlabel="updates", ylabel="held-out success", ylim=(0.0, None))
    axes.legend(frameon=False)
    return figure


def main() -> None:
    """Train what is missing, compare, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", nargs="+", default=[
        str(ROOT / "configs" / "quickstart.yaml"), str(ROOT / "benchmarks" / "credit_ablation.yaml")
    ])  # fmt: skip
    parser.add_argument("--variants", nargs="+", default=[BASELINE, "trace"])
    parser.add_argument("--seeds", type=int, default=8, help="how many")
    parser.add_argument("--first-seed", type=int, default=200)
    parser.add_argument("--runs", type=Path, default=Path("runs/credit_ablation"))
    parser.add_argument("--output", type=Path, help="folder of table and figure; default: --runs")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each run")
    arguments = parser.parse_args()
    if BASELINE not in arguments.variants:
        parser.error(f"expected '{BASELINE}' among --variants, got {arguments.variants}")
    # Seeds outermost: whatever was finished when a call is interrupted is paired.
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    cases = list(product(seeds, arguments.variants))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        jobs = [pool.submit(train, arguments, variant, seed) for seed, variant in cases]
        for job in tqdm(as_completed(jobs), total=len(jobs), desc="runs"):
            job.result()
    curves = {
        variant: [read_curve(arguments.runs / variant / f"seed_{seed}") for seed in seeds]
        for variant in arguments.variants
    }
    found = compare(curves)
    output = arguments.output or arguments.runs
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / "credit_ablation.md", table(found))
    draw(curves).savefig(output / "credit_ablation.png", dpi=120)
    ratio = None
    if "trace" in found:
        trace, base = (found[name]["median_updates_to_grpo"] for name in ("trace", BASELINE))
        ratio = round(float(np.array(trace) / np.array(base)), 3)
    print(json.dumps({"name": "credit_ablation", "ratio": ratio, "variants": found}))


if __name__ == "__main__":
    main()
