"""Runs the benchmarks of speed and memory and writes docs/performance.md from what they print.

    python benchmarks/all.py                   # all of them
    python benchmarks/all.py rl_step.py        # this one; the others as they were measured before

What was measured is kept in docs/performance.json. Nothing else should run meanwhile. TRL is
compared with only where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from parity_words import limits_section, stale_section

from trace_pl.files import write_atomically

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"


class Measurements:
    """What the benchmarks printed, kept in a file as soon as each has ended.

    Args:
        path: The file.
        wanted: Scripts to run even if the file holds their results; none means all.
    """

    def __init__(self, path: Path, wanted: Sequence[str]) -> None:
        self.path = path
        self.wanted = wanted
        self._found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def knows(self, script: str) -> bool:
        """Return whether a benchmark was run before and is not wanted anew."""
        return script in self._found and bool(self.wanted) and script not in self.wanted

    def __call__(self, script: str, *arguments: str) -> dict[str, Any]:
        """Return what a benchmark printed on its last line, now or before."""
        key = " ".join([script, *arguments])
        if self.wanted and script not in self.wanted and key in self._found:
            return dict(self._found[key])
        print(f"== {key}", file=sys.stderr, flush=True)
        command = [sys.executable, str(HERE / script), *arguments]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, cwd=HERE.parent
        )
        self._found[key] = json.loads(done.stdout.strip().splitlines()[-1])
        write_atomically(self.path, json.dumps(self._found, indent=1, sort_keys=True) + "\n")
        return dict(self._found[key])


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def machine() -> str:
    """Return processor, system and versions in words."""
    names = ("torch", "transformers", "lightning")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    cores = os.cpu_count()
    return f"{cores} CPU cores ({platform.machine()}, {platform.system()}), no GPU; {versions}"


def probe_section(found: dict[str, Any]) -> str:
    """Return the words and numbers of probe.py."""
    rows = [
        [
            f"{case['tokens']:,}", case["turns"], case["fewer_tokens"], case["less_time"],
            case["peak_mib"][0], case["peak_mib"][1], f"{case['max_difference']:.0e}",
        ]
        for case in found["cases"]
    ]  # fmt: skip
    head = [
        "tokens", "turns", "times fewer tokens", "times less wall time", "peak MiB",
        "peak MiB per prefix", "largest difference, nats",
    ]  # fmt: skip
    growth = {
        name: f"turns^{fit['turns']:.2f} tokens^{fit['tokens']:.2f}"
        for name, fit in found["growth"].items()
    }
    return f"""## Scoring all boundaries of one trajectory

    python benchmarks/probe.py

Against one forward for each prefix, in padded batches; goal at 60 turns and 4,096 tokens: 15 times
less wall time, 25 times fewer tokens. {found["parameters"]:,} parameters, float32,
{found["threads"]} thread.

{table(head, rows)}
Seconds grow as {growth["branched"]} with branches and as {growth["per prefix"]} without.

![Seconds over turns](performance_probe.png)
"""


def step_section(found: dict[str, Any], wide: dict[str, Any]) -> str:
    """Return the words and numbers of train_step.py."""
    rows = [
        [
            f"{case['layers']} layers of {case['width']}", case["ratio"], case["ratio_to_sorted"],
            case["padding"]["padded"], case["padding"]["sorted"], f"{case['gradient_error']:.0e}",
        ]
        for case in (found, wide)
    ]  # fmt: skip
    head = [
        "model", "times faster than padded", "than padded by length", "padding per token",
        "by length", "gradient error",
    ]  # fmt: skip
    return f"""## A training step over ragged rollouts

    python benchmarks/train_step.py

Packed rows against padded batches of eight; lengths uniform from 1/16 to all of
{found["longest"]:,} tokens. Goal: 1.5 times faster.

{table(head, rows)}"""


def memory_section(found: dict[str, Any]) -> str:
    """Return the words and numbers of logprob_memory.py."""
    return f"""## Log-probs over a large vocabulary

    python benchmarks/logprob_memory.py

Peak memory of {found["rows"]:,} log-probs over {found["vocab"]:,} tokens with their gradient:
{found["chunked_mib"]:,} MiB in chunks, {found["full_mib"]:,} MiB with all logits at once (a ratio
of {found["ratio"]}, goal 0.125); one tensor of float32 logits takes {found["full_logits_mib"]:,}
MiB. Gradients differ by {found["gradient_error"]:.0e} (relative). Chunks take
{found["time_ratio"]} of the time.
"""


def share_section(found: dict[str, Any], hard: dict[str, Any]) -> str:
    """Return the words and numbers of scoring_share.py."""
    return f"""## What TRACE adds to a GRPO step

    python benchmarks/scoring_share.py

In the quickstart credit takes {100 * found["ratio"]:.1f} % of the time of rollout and update
together ({100 * found["of_update"]:.0f} % of the update); with 4-hop questions
{100 * hard["ratio"]:.1f} %. Goal: at most 15 %. Every run logs its own share as `time/*`.
"""


def loop_section(found: dict[str, Any]) -> str:
    """Return the words and numbers of agent_loop.py."""
    return f"""## Rollouts with tools of uneven speed

    python benchmarks/agent_loop.py

{found["rollouts"]} rollouts of {found["turns"][0]} to {found["turns"][1]} turns, tools that answer
after exponential times of {found["latency"]} s on average: {found["ratio"]} times as many
trajectories per second as with a barrier after every turn (goal 1.5), and
{100 * found["same_rollouts"]:.0f} % of the rollouts are the same, token by token.
"""


def waiting_section(found: dict[str, Any]) -> str:
    """Return the words and numbers of waiting.py."""
    ways = ["static", "shared", "shared, 25 % extra", "longest first"]
    shares = ("occupied", "waiting", "used")
    rows = [
        [
            case["questions_per_rank"], f"{100 * case['slowest']:.0f} %",
            *(" / ".join(str(case[way][share]) for share in shares) for way in ways),
        ]
        for case in found["simulated"]
    ]  # fmt: skip
    real = {
        name: [f"{max(way['seconds'])} s, {100 * way['waiting']:.0f} %" for way in ways]
        for name, each in found["real"].items()
        for ways in [[each["static"], each["shared"]]]
    }
    same = all(each["same_rollouts"] for each in found["real"].values())
    head = ["questions per rank", "speed of the slowest", *ways]
    return f"""## Ranks that wait for each other

    python benchmarks/waiting.py

Ranks take the next question as they have room; static dealing gives each its questions beforehand.
Simulated for {found["ranks"]} ranks with {found["places"]} places in each engine, groups of
{found["group_size"]}, lengths log-normal (sigma 0.6, half of the variance between questions). Per
cent of the places that are filled while a rank works / of the ranks' time spent waiting at the end
/ of all places over the whole phase that make tokens which are trained on:

{table(head, rows)}
Sharing keeps a slow rank from holding up the others. Among like ranks it changes little, for what
is left is the tail: trajectories that are long and began late. No order takes it away while lengths
are not known ("longest first" knows them). More questions per epoch do, and so do
`data.extra_questions`, at the price that its documentation names; `data.max_staleness` of 1 hides
it behind the training.

Two real ranks, {found["questions"]} questions of two rollouts with vLLM, four places each, tools
that answer after {found["latency"]} s in the median (log-normal by question); seconds of the phase
and share of the ranks' time spent waiting. Where one rank's tools are slow, a single trajectory of
its takes most of the phase. The machine was not quiet: between runs the seconds of like ranks
varied by a quarter, either way ahead. The rollouts of both ways are
{"the same, token by token" if same else "not the same"}.

{
        table(
            ["tools of the two ranks", "static", "shared"],
            [["alike", *real["alike"]], ["of the first three times as slow", *real["unlike"]]],
        )
    }"""


def push_section(found: dict[str, Any]) -> str:
    """Return the words and numbers of weight_push.py."""
    rows = [
        [
            f"{case['parameters']:,}", case["model_mib"], case["ratio"], case["ratio_to_reload"],
            case["ratio_to_restart"], case["push_mib_above"], case["copied_push_mib_above"],
            f"{case['parity_nats']:.0e}",
        ]
        for case in (found["wide"], found["tiny"])
    ]  # fmt: skip
    head = [
        "parameters", "MiB", "times faster than saving and reloading", "than reloading alone",
        "than saving and a new engine", "peak MiB above the resting level", "after copying all",
        "parity, nats",
    ]  # fmt: skip
    return f"""## A weight push into vLLM

    python benchmarks/weight_push.py

As tensors, one by one, against `save_pretrained` and vLLM's own reload of the file; goal: 5 times
faster. Float32 on one thread, a random Qwen3 and the built-in base.

{table(head, rows)}
On the way to a server weights pass through files: {found["wide"]["files_gb_s"]} GB/s in bfloat16,
written, read and parsed one after the other.
"""


def flat_section(found: dict[str, Any]) -> str:
    """Return the words and numbers of memory_flat.py."""
    return f"""## Memory over many epochs

    python benchmarks/memory_flat.py

Resident memory of the process after {found["epochs"]} small epochs of rollouts with vLLM, credit
and updates: {found["ratio"]} times that after epoch 5, a slope of {found["mib_per_epoch"]} MiB per
epoch.
"""


def trl_section(found: dict[str, Any]) -> str:
    """Return the words and numbers of rl_step.py."""
    rows = [
        [
            name, found["tokens_per_rollout"][name],
            *(f"{100 * share.get(phase, 0.0):.0f} %" for phase in ("rollout", "credit", "update")),
        ]
        for name, share in found["shares"].items()
    ]  # fmt: skip
    head = ["trainer", "tokens per rollout", "rollout", "credit", "update"]
    return f"""## A whole RL step beside TRL

    pip install trl datasets
    python benchmarks/rl_step.py

Same random model of the built-in base's size, same prompts, {found["questions"]} x 8 responses of
up to {found["response_tokens"]} tokens, one update each, {found["threads"]} thread. TRL
{found["trl"]} samples with transformers' generate, for its vLLM mode asks for a GPU.

TRL's step takes {found["ratio"]} times as long as ours: its rollouts {found["rollout_ratio"]}
times, its update {found["update_ratio"]} times. Shares of each step:

{table(head, rows)}"""


def main() -> None:
    """Run everything and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scripts", nargs="*", help="only these; the others as measured before")
    parser.add_argument("--note", default="", help="what else a reader should know of the machine")
    arguments = parser.parse_args()
    run = Measurements(DOCS / "performance.json", arguments.scripts)
    sections = [
        "# Performance\n",
        "Written by `python benchmarks/all.py`; ratios of two ways measured in one run, on "
        f"{machine()}. {arguments.note}".strip()
        + "\n",
        probe_section(run("probe.py", "--repeats", "1", "--figure", "docs/performance_probe.png")),
        step_section(
            run("train_step.py"),
            run("train_step.py", "--layers", "4", "--width", "512", "--rows", "32"),
        ),
        memory_section(run("logprob_memory.py")),
        share_section(run("scoring_share.py"), run("scoring_share.py", "--hops", "4")),
    ]
    sections.append(loop_section(run("agent_loop.py")))
    sections.append(waiting_section(run("waiting.py")))
    sections.append(push_section(run("weight_push.py")))
    sections.append(limits_section(run("parity_limits.py"), table))
    sections.append(stale_section(run("stale_weights.py"), table))
    sections.append(flat_section(run("memory_flat.py")))
    if importlib.util.find_spec("trl") or run.knows("rl_step.py"):
        sections.append(trl_section(run("rl_step.py")))
    write_atomically(DOCS / "performance.md", "\n".join(sections))


if __name__ == "__main__":
    main()
