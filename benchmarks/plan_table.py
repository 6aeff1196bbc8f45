"""Writes docs/scale.md: what `trace-pl plan` says of Qwen3-4B and Qwen3-30B-A3B on one node.

    python benchmarks/plan_table.py

The figures of prime-rl beside ours are those that it published, see `PUBLISHED`.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from trace_pl.files import write_atomically
from trace_pl.plan.command import make_run
from trace_pl.plan.flops import TERA, phases_of
from trace_pl.plan.inputs import GIB, Run
from trace_pl.plan.memory import memory_of
from trace_pl.plan.remedies import fits
from trace_pl.plan.report import report, update_rate

ROOT = Path(__file__).parents[1]
H100 = "--gpus 8 --gpu-memory 80"
H200 = "--gpus 8 --gpu-memory 141 --memory-tb-s 4.8"
DENSE, MIXTURE = "--config configs/qwen3_4b.yaml", "--config configs/qwen3_30b_a3b.yaml"
OFFLOAD = "--config configs/strategy/fsdp_offload.yaml"
LENGTHS = "--tokens-per-trajectory 32768 --sampled-tokens 8192 --turns 40"
OWN_ENGINE = "--engine-gpus 8"
CASES = {
    "Qwen3-4B on 8 x 80 GB": f"{DENSE} {H100} {LENGTHS}",
    "Qwen3-4B on 8 x 141 GB": f"{DENSE} {H200} {LENGTHS}",
    "Qwen3-30B-A3B on 8 x 80 GB": f"{MIXTURE} {H100} {LENGTHS}",
    "Qwen3-30B-A3B on 8 x 80 GB, the engine on 8 more": (
        f"{MIXTURE} {OFFLOAD} {H100} {LENGTHS} {OWN_ENGINE}"
    ),
    "Qwen3-30B-A3B on 8 x 141 GB": f"{MIXTURE} {H200} {LENGTHS}",
    "Qwen3-30B-A3B on 8 x 141 GB, the engine on 8 more": (
        f"{MIXTURE} {H200} {LENGTHS} {OWN_ENGINE}"
    ),
}

WORDS = """# What a run needs

`trace-pl plan` takes the arguments of `trace-pl fit` and says, from the model's `config.json` alone,
what memory each GPU needs, whether that fits, what to change if not, and how long an epoch takes. It
loads no weights and needs no GPU. It ends with exit code 1 if the run does not fit. This page is
written by `python benchmarks/plan_table.py`; every figure of ours in it is the command's. **None of
it was measured on a GPU.**

{overview}

All of them with `{lengths}`. One epoch is one update on 128 trajectories.

## Beside another trainer

prime-rl publishes what its trainer alone reaches on 8 H200, full-parameter RL, with activations
recomputed ([source]({source})). The plan's figures are for the same step: two sequences for each GPU,
every token trained. They are what we expect, theirs are what they measured.

{comparison}

"Utilisation in theirs" is the share of the peak that their time would be of our count of operations;
the plan assumes {device.utilisation:.0%} throughout. The plan is far above them where it is small:
their times of the two lengths differ by less than the lengths, so much of a short step is spent on
something that does not grow with tokens, which the plan does not know of. Take the plan's seconds as
what good kernels reach, and its memory as what the run will need. Our GiB leave out the frozen
reference, which theirs has not, and the reserve.

## What is assumed

| option | default | meaning |
| --- | --- | --- |
| `--gpu-memory` | {device.gpu_memory:g} | GiB of one GPU (what `nvidia-smi` shows as MiB, by 1024) |
| `--peak-tflops` | {device.peak_tflops:g} | dense bfloat16 rate of an H100 or H200 SXM |
| `--peak-tflops-fp32` | {device.peak_tflops_fp32:g} | the same in float32 |
| `--memory-tb-s` | {device.memory_tb_s:g} | bandwidth of its memory: an H100's; give 4.8 for an H200 |
| `--link-gb-s` | {device.link_gb_s:g} | to a GPU of the same node, one direction |
| `--network-gb-s` | {device.network_gb_s:g} | to a GPU of another node |
| `--host-gb-s` | {device.host_gb_s:g} | to main memory |
| `--utilisation` | {device.utilisation:g} | share of the peak that arithmetic reaches |
| `--bandwidth-utilisation` | {device.bandwidth_utilisation:g} | share of each bandwidth |
| `--reserve-gib` | {device.reserve_gib:g} | CUDA context, NCCL, CUDA graphs, fragmentation |
| `--gpus` | of the config | GPUs of the trainer |
| `--engine-gpus` | 0 for an engine in process | GPUs that only the engine uses |
| `--tokens-per-trajectory` | `data.limits.max_trajectory_tokens` | |
| `--turns` | `data.limits.max_turns` | tool turns |
| `--sampled-tokens` | all that the limits allow | tokens that the policy sampled |
| `--answer-tokens` | {answer_tokens} | tokens of all branches of one boundary |

Memory. Every kind is taken at its own largest moment, on the fullest GPU.
- *weights, gradients, optimizer*: parameters in `model.dtype`, divided by the GPUs that share a copy;
  the optimizer's state is that of one step of the configured optimizer. An adapter's own alone.
- *reference*: a frozen copy in the type of the computation, divided likewise; none if no stage and no
  loss reads it, or if an adapter is switched off instead.
- *activations*: of the larger of an update's forward and a scoring forward: every tensor that the
  layers save, counted one by one, and the gradients alive beside them. Attention keeps keys and values
  of all heads; the vocabulary head works in chunks; logits and norms are float32.
- *engine weights, kv cache*: a whole copy on each GPU for an engine in process; `kv_cache_gib`, or
  what `gpu_memory_utilization` leaves beside the weights and a forward of 8,192 tokens.
- *buffers*: the layer in use and the next one gathered, what lies outside the layers gathered
  throughout, gradients on their way to the other ranks; with `ddp` the buckets.

Arithmetic. 2 operations for each parameter and token, twice that backward, once more forward where
activations are recomputed; half a square of attention; of a mixture the experts that a token visits.
An update exchanges its layers while it computes, so the slower of both counts. Decoding reads all
weights once for each token of the sequences at hand, and the keys and values of half a trajectory.
Tools, tokenising, uneven lengths, checkpoints and evaluation take no time. Routers of a mixture are
counted like its other weights.

What is checked: on one process and on two (`ddp`, and FSDP2 over gloo) with random models,
`tests/plan` finds weights, gradients and optimizer state equal to the byte, saved activations and the
largest moment of a backward pass within a tenth, gathered layers and buckets with them within 15 %.
Before a run on GPUs loads anything, the same plan stops it if what does not depend on lengths exceeds
the memory, and warns if the rest may.

## The plans
"""


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


def run_beside(row: Published) -> Run:
    """Return our plan of the same step: 16 sequences, every token trained."""
    length = f"--tokens-per-trajectory {row.tokens} --sampled-tokens {row.tokens}"
    size = f"--data.questions_per_epoch 2 --data.tokens_per_forward {row.tokens}"
    return make_run(shlex.split(f"{row.config} {H200} {OWN_ENGINE} {length} {size}"))


def implied_utilisation(row: Published, run: Run) -> float:
    """Return the share of the peak that their time would be of our count of operations."""
    update = next(p for p in phases_of(run) if p.name == "update")
    micro_batches = run.work.trajectories / run.sharding.world
    return update.flops / (row.seconds * micro_batches * run.device.peak_tflops * TERA)


def table(head: list[str], rows: list[list[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def overview(runs: dict[str, Run]) -> str:
    """Return one line for each case."""
    rows: list[list[object]] = []
    for title, run in runs.items():
        seconds = {p.name: p.seconds for p in phases_of(run)}
        names = ("rollout", "credit", "update", "weight push")
        rows.append(
            [
                title,
                f"{memory_of(run).total / GIB:.1f}",
                "yes" if fits(run) else "no",
                *(f"{seconds[name]:.1f}" for name in names),
                f"{update_rate(run):,.0f}",
            ]
        )
    head = ["", "GiB per GPU", "fits", "rollout s", "credit s", "update s", "push s"]
    return table([*head, "tokens/s of the update"], rows)


def comparison(runs: list[Run]) -> str:
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


def page(runs: dict[str, Run], beside: list[Run]) -> str:
    """Return docs/scale.md."""
    parts = [WORDS.format(overview=overview(runs), comparison=comparison(beside), source=SOURCE)]
    for title, arguments in CASES.items():
        parts.append(
            f"### {title}\n\n    trace-pl plan {arguments}\n\n```\n{report(runs[title])}\n```"
        )
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
