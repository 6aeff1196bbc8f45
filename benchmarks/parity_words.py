"""The sections of docs/performance.md on engine and trainer after a push."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trace_pl.rollout.parity_limits import ParityLimits

Table = Callable[[Sequence[str], Sequence[Sequence[object]]], str]

_CAUSES = ("float32", "float32, 4 tokens to other experts", "TF32 attention", "bfloat16")
_FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def limits_section(found: dict[str, Any], table: Table) -> str:
    """Return the words and numbers of parity_limits.py."""
    rows: dict[tuple[str, int], dict[str, list[float]]] = {}
    for case in found["cases"]:
        row = rows.setdefault((case["kind"], case["layers"]), {})
        for cause in _CAUSES:
            if cause in case:  # the largest of all seeds
                seen = row.get(cause, [0.0] * 3)
                row[cause] = [max(pair) for pair in zip(seen, case[cause], strict=True)]
    cells = [
        [*model, *(" / ".join(f"{nats:.1g}" for nats in row.get(cause, ())) for cause in _CAUSES)]
        for model, row in rows.items()
    ]
    limits = [
        [
            f"{name}{', experts' if has_experts else ''}", layers,
            *(f"{nats:.1g}" for nats in (limit.mean, limit.high, limit.largest)),
        ]
        for name, dtype in _FORMATS.items()
        for has_experts in (False, True)
        for layers in (2, 36)
        for limit in [ParityLimits.derived({dtype}, layers, has_experts)]
    ]  # fmt: skip
    return f"""## Two right computations of the same log-probs

    python benchmarks/parity_limits.py

What a push may leave between engine and trainer with `data.parity_tolerance: null`. Random Qwen3
and Qwen3-MoE (8 of 128 experts), as sure as a language model (1.5 nats), {found["tokens"]} tokens
that they sampled; the trainer's forward against transformers' plain attention, vLLM and the other
format, the worst pair of each: mean, 99th percentile and largest, in nats. In TF32, as a float32
engine on a GPU would multiply unless told otherwise, the mean is {found["ratio"]} times that of
float32. A trained model is quieter: SmolLM2-135M-Instruct (30 layers, with `--model`) differs by
0.04 on average, 0.2 in the 99th percentile and 0.6 at most in bfloat16, by 5e-6 on average in
float32.

{table(["model", "layers", *_CAUSES], cells)}
The limits that follow; beyond that of mean or percentile a run stops, beyond half of any
`HealthMonitor` warns:

{table(["coarser side", "layers", "mean", "99th percentile", "largest"], limits)}"""


def stale_section(found: dict[str, Any], table: Table) -> str:
    """Return the words and numbers of stale_weights.py."""
    cases = found["cases"]
    faults = sorted({f for parts in cases.values() for p in parts.values() for f in p})
    parts = sorted({part for parts in cases.values() for part in parts})

    def cell(part: str, fault: str, place: int) -> str:
        shares = (kinds.get(part, {}).get(fault) for kinds in cases.values())
        return " / ".join("-" if each is None else f"{each[place]:.2g}" for each in shares)

    missed: dict[str, list[str]] = {}
    for kind, found_parts in cases.items():
        for part, found_faults in found_parts.items():
            for fault, shares in found_faults.items():
                if shares[0] < 1.0:
                    missed.setdefault(fault, []).append(f"{part} ({kind})")
    unseen = "; ".join(f"{fault}: {', '.join(names)}" for fault, names in missed.items())

    return f"""## Which wrong weights one prompt shows

    python benchmarks/stale_weights.py

One tensor of the engine's copy is wrong, in the middle layer if there are many. Each number is the
larger of mean and 99th percentile of the differences as a share of its limit in bfloat16; from 1 on
the push fails. First a random model of {found["layers"]} layers, then one with experts, then the
built-in base of 2 layers. "Frozen" is a tensor that kept its values while the policy's moved as
far as so many steps of Adam can take them, all in one direction.

{table(["weight", *faults], [[part, *(cell(part, f, 1) for f in faults)] for part in parts])}
In SmolLM2-135M-Instruct (30 layers) every matrix in another order or of another layer gives 1.6 or
more, a norm of another layer 0.4. So half precision shows most matrices that are wrong, and hides
norms and nearly everything that is merely old: a step of 1e-6 is below the rounding of either side.
`trace-pl doctor` compares single weights where the engine shows them.

In float32 {100 * found["ratio_float32"]:.0f} % of these faults fail. Not seen are: {unseen}.
"""
