"""Scoring every boundary of long trajectories: one pass with branches, or one forward per prefix.

Both scorers read the same random trajectory with the same random Qwen3; each case runs in a process
of its own, whose peak is the growth of the resident set while scoring. Draws how the cost grows
with turns and with length, with the exponents of a power law fitted to all cases.

    python benchmarks/probe.py --turns 5 20 60 --tokens 1024 4096 16384
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from trace_pl.models.packed_attention import PACKED
from trace_pl.probes import Branch, ProbeRequest
from trace_pl.scoring import BranchedScorer, PrefixScorer

SCORERS = {"branched": BranchedScorer, "per prefix": PrefixScorer}
VOCAB = 1_280


@dataclass(frozen=True)
class Case:
    """One measurement."""

    scorer: str
    turns: int
    tokens: int
    read: int = 0
    """Tokens that went through the model, padding included."""
    seconds: float = 0.0
    peak_mib: float = 0.0
    scores: tuple[float, ...] = ()


def make_model(layers: int, width: int) -> PreTrainedModel:
    """Return a random Qwen3 with heads of 64 and half as many of keys and values."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        head_dim=64,
        max_position_embeddings=32_768,
        attn_implementation=PACKED,
    )
    return Qwen3ForCausalLM(config).eval()


def make_request(turns: int, tokens: int) -> ProbeRequest:
    """Return a trajectory of equal turns after a prompt, and one answer of eight tokens."""
    generator = torch.Generator().manual_seed(0)
    prompt = min(256, tokens // 4)
    ends = np.linspace(prompt, tokens, turns + 1).astype(int)
    ids = torch.randint(VOCAB, (tokens,), generator=generator)
    return ProbeRequest("q/0", ids, tuple(ends.tolist()), (Branch(tuple(range(8)), (9,) * 8),))


def measure(case: Case, layers: int, width: int, threads: int, repeats: int) -> Case:
    """Return the case with its figures; seconds are the least of all repeats."""
    torch.set_num_threads(threads)
    model, request = make_model(layers, width), make_request(case.turns, case.tokens)
    scorer = SCORERS[case.scorer](model)
    scorer.score([make_request(1, 64)])
    read: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(repeats):
        start = perf_counter()
        (scores,) = scorer.score([request])
        seconds.append(perf_counter() - start)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return Case(
        case.scorer, case.turns, case.tokens, sum(read) // repeats, min(seconds), peak,
        tuple(scores[:, 0].tolist()),
    )  # fmt: skip


def growth(cases: list[Case]) -> dict[str, float]:
    """Return the exponents of seconds ~ turns^a tokens^b, by least squares in logarithms."""
    sizes = np.log([[case.turns, case.tokens] for case in cases])
    seconds = np.log([case.seconds for case in cases])
    solution, *_ = np.linalg.lstsq(np.column_stack([sizes, np.ones(len(cases))]), seconds)
    return {"turns": round(float(solution[0]), 2), "tokens": round(float(solution[1]), 2)}


def draw(cases: list[Case], fits: dict[str, dict[str, float]]) -> Figure:
    """Return seconds over turns, one line for each scorer and length."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for scorer, style in zip(SCORERS, ("-", "--"), strict=True):
        for number, tokens in enumerate(sorted({case.tokens for case in cases})):
            line = [c for c in cases if c.scorer == scorer and c.tokens == tokens]
            axes.plot(
                [c.turns for c in line], [c.seconds for c in line],
                style, color=f"C{number}", marker="o", label=f"{scorer}, {tokens:,} tokens",
            )  # fmt: skip
    words = "; ".join(
        f"{name} ~ turns^{fit['turns']:.2f} tokens^{fit['tokens']:.2f}"
        for name, fit in fits.items()
    )
    axes.set(xscale="log", yscale="log", xlabel="turns", ylabel="seconds")
    axes.set_title(words, fontsize="small")
    axes.legend(frameon=False, fontsize="small", ncols=2)
    return figure


def main() -> None:
    """Measure all cases, draw them and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, nargs="+", default=[5, 20, 60])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--figure", type=Path, help="where to put the picture")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    cases = []
    grid = list(product(arguments.tokens, arguments.turns, SCORERS))
    for tokens, turns, scorer in tqdm(grid, desc="cases"):
        with context.Pool(1) as pool:
            sizes = (arguments.layers, arguments.width, arguments.threads, arguments.repeats)
            cases.append(pool.apply(measure, (Case(scorer, turns, tokens), *sizes)))
    pairs = list(zip(cases[::2], cases[1::2], strict=True))
    fits = {name: growth([c for c in cases if c.scorer == name]) for name in SCORERS}
    if arguments.figure:
        draw(cases, fits).savefig(arguments.figure, dpi=120)
    rows = [
        {
            "turns": one.turns,
            "tokens": one.tokens,
            "fewer_tokens": round(other.read / one.read, 1),
            "less_time": round(other.seconds / one.seconds, 1),
            "peak_mib": [round(one.peak_mib), round(other.peak_mib)],
            "max_difference": float(np.abs(np.subtract(one.scores, other.scores)).max()),
        }
        for one, other in pairs
    ]
    middle = next((r for r in rows if (r["turns"], r["tokens"]) == (60, 4096)), rows[-1])
    print(
        json.dumps(
            {
                "name": "probe",
                "ratio": middle["less_time"],
                "at": [middle["turns"], middle["tokens"]],
                "growth": fits,
                "cases": rows,
                "parameters": sum(
                    p.numel() for p in make_model(arguments.layers, arguments.width).parameters()
                ),
                "threads": arguments.threads,
                "seconds": [asdict(c)["seconds"] for c in cases],
            }
        )
    )


if __name__ == "__main__":
    main()
