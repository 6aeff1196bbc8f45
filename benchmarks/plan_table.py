"""Writes docs/scale.md: what `trace-pl plan` says of Qwen3-4B and Qwen3-30B-A3B on one node.

    python benchmarks/plan_table.py

The figures of prime-rl beside ours are those that it published, see `PUBLISHED`.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from trace_pl.commands.plan.inputs import GIB, Assumptions, Device, PlannedRun
from trace_pl.commands.plan.memory import memory_of
from trace_pl.commands.plan.phases import phases_of
from trace_pl.commands.plan.planning import make_run
from trace_pl.commands.plan.remedies import fits
from trace_pl.commands.plan.report import report, update_rate
from trace_pl.commands.plan.traffic import TERA
from trace_pl.files import write_atomically

ROOT = Path(__file__).parents[1]
H100 = "--gpus 8 --gpu-memory 80"
H200 = "--gpus 8 --gpu-memory 141 --memory-tb-s 4.8"
FOUR_NODES = "--gpus 32 --gpu-memory 141 --memory-tb-s 4.8 --engine-gpus 32 --engine-servers 8"
DENSE, MIXTURE = "--config configs/qwen3_4b.yaml", "--config configs/qwen3_30b_a3b.yaml"
OFFLOAD = "--config configs/strategy/fsdp_offload.yaml"
EXPERTS = "--config configs/strategy/expert_parallel.yaml"
LORA = "--config configs/options/lora.yaml"
LENGTHS = "--sampled-tokens 12288"
SHORT = "--tokens-per-trajectory 16384 --data.tokens_per_forward 16384 --sampled-tokens 4096"
OWN_ENGINE = "--engine-gpus 8"
IN_PROCESS = (
    "--data.engine trace_pl.engines.VLLMEngine --data.engine.max_model_len 16384 "
    "--data.engine.max_num_seqs 16 --data.engine.dtype bfloat16 --data.engine.kv_cache_gib null "
    "--data.engine.gpu_memory_utilization 0.55"
)
CASES = {
    "Qwen3-4B on 8 x 80 GB": f"{DENSE} {H100} {LENGTHS}",
    "Qwen3-4B on 8 x 141 GB": f"{DENSE} {H200} {LENGTHS}",
    "Qwen3-30B-A3B on 8 x 80 GB, engine on 8 more": f"{MIXTURE} {H100} {LENGTHS} {OWN_ENGINE}",
    "Qwen3-30B-A3B on 8 x 80 GB, 16k tokens, reference in main memory, engine on 8 more": (
        f"{MIXTURE} {OFFLOAD} {H100} {SHORT} {OWN_ENGINE}"
    ),
    "Qwen3-30B-A3B on 8 x 141 GB, engine on 8 more": f"{MIXTURE} {H200} {LENGTHS} {OWN_ENGINE}",
    "Qwen3-30B-A3B on 8 x 141 GB, engine in process": (f"{MIXTURE} {H200} {SHORT} {IN_PROCESS}"),
    "Qwen3-30B-A3B on 8 x 141 GB, adapter, 16k tokens, engine in process": (
        f"{MIXTURE} {LORA} {H200} {SHORT} {IN_PROCESS}"
    ),
    "Qwen3-30B-A3B on 32 x 141 GB, 16k tokens, engine on 32 more": (
        f"{MIXTURE} {FOUR_NODES} {SHORT} --data.questions_per_epoch 64"
    ),
    "Qwen3-30B-A3B on 32 x 141 GB, 16k tokens, experts divided, engine on 32 more": (
        f"{MIXTURE} {EXPERTS} {FOUR_NODES} {SHORT} --data.questions_per_epoch 64"
    ),
}
WORDS = Path(__file__).with_name("scale_words.md")
"""The page without its tables."""


@dataclass(frozen=True)
class Published:
    """One row of prime-rl's table: full-parameter RL steps of its trainer alone on 8 H200."""

    config: str
    model: str
    tokens: int
    tokens_per_s: float
    seconds: float
    """Of one micro-batch: a sequence of ``tokens`` on each GPU."""
    peak_gib: float


SOURCE = (
    "https://github.com/PrimeIntellect-ai/prime-rl/blob/"
    "30bf494fe5b44777ee10764ba8a32b579a91f65e/benchmarks/results/BENCHMARKS.md"
)
PUBLISHED = (
    Published(DENSE, "Qwen3-4B", 16_384, 27_440, 4.78, 17.1),
    Published(DENSE, "Qwen3-4B", 65_536, 29_540, 17.75, 36.1),
    Published(MIXTURE, "Qwen3-30B-A3B", 16_384, 5_940, 22.06, 74.6),
    Published(MIXTURE, "Qwen3-30B-A3B", 65_536, 12_750, 41.13, 105.4),
)


def run_beside(row: Published) -> PlannedRun:
    """Return our plan of the same step: 16 sequences, every token trained."""
    length = f"--tokens-per-trajectory {row.tokens} --sampled-tokens {row.tokens}"
    size = f"--data.questions_per_epoch 2 --data.tokens_per_forward {row.tokens}"
    return make_run(shlex.split(f"{row.config} {H200} {OWN_ENGINE} {length} {size}"))


def implied_utilisation(row: Published, run: PlannedRun) -> float:
    """Return the share of the peak that their time would be of our count of operations."""
    update = next(p for p in phases_of(run) if p.name == "update")
    micro_batches = run.work.trajectories / run.sharding.world
    return update.flops / (row.seconds * micro_batches * run.device.peak_tflops * TERA)


def table(head: list[str], rows: list[list[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def overview(runs: dict[str, PlannedRun]) -> str:
    """Return one line for each case."""
    rows: list[list[object]] = []
    for title, run in runs.items():
        seconds = {p.name: p.seconds for p in phases_of(run)}
        names = ("rollout", "credit", "update", "weight push")
        rows.append(
            [
                title,
                f"{run.work.tokens:,}",
                f"{memory_of(run).total / GIB:.1f}",
                "yes" if fits(run) else "no",
                *(f"{seconds[name]:.1f}" if fits(run) else "-" for name in names),
                f"{update_rate(run):,.0f}" if fits(run) else "-",
            ]
        )
    head = ["", "tokens", "GiB per GPU", "fits", "rollout s", "credit s", "update s", "push s"]
    return table([*head, "tokens/s of the update"], rows)


def comparison(runs: list[PlannedRun]) -> str:
    """Return our plan beside each published row."""
    rows: list[list[object]] = []
    for row, run in zip(PUBLISHED, runs, strict=True):
        memory = memory_of(run)
        ours = (memory.total - memory.reserve - memory.reference) / GIB
        rows.append(
            [
                row.model,
                f"{row.tokens:,}",
                f"{row.tokens_per_s:,.0f}",
                f"{update_rate(run):,.0f}",
                f"{implied_utilisation(row, run):.0%}",
                f"{row.peak_gib:.1f}",
                f"{ours:.1f}",
            ]
        )
    head = ["model", "tokens of a sequence", "prime-rl tokens/s", "plan tokens/s"]
    return table([*head, "utilisation in theirs", "prime-rl peak GiB", "plan GiB"], rows)


def page(runs: dict[str, PlannedRun], beside: list[PlannedRun]) -> str:
    """Return docs/scale.md."""
    words = WORDS.read_text(encoding="utf-8").rstrip()
    parts = [
        words.format(
            overview=overview(runs),
            comparison=comparison(beside),
            source=SOURCE,
            device=Device(),
            answer_tokens=Assumptions().answer_tokens,
        )
    ]
    for title, arguments in CASES.items():
        command = f"    trace-pl plan {arguments}"
        parts.append(f"### {title}\n\n{command}\n\n```\n{report(runs[title])}\n```")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write the page and print the figures."""
    runs = {title: make_run(shlex.split(arguments)) for title, arguments in CASES.items()}
    beside = [run_beside(row) for row in PUBLISHED]
    write_atomically(ROOT / "docs" / "scale.md", page(runs, beside))
    rates = {
        f"{r.model} {r.tokens}": round(update_rate(run))
        for r, run in zip(PUBLISHED, beside, strict=True)
    }
    found = {
        "name": "plan_table",
        "ratio": round(update_rate(beside[0]) / PUBLISHED[0].tokens_per_s, 2),
        "tokens_per_s": rates,
        "gib": {title: round(memory_of(run).total / GIB, 1) for title, run in runs.items()},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
