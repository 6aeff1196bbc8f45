"""Which weights that an engine did not take show in the log-probs of one prompt.

One tensor of the engine's copy is wrong: its rows are in another order, it is that of another
layer, or it stayed as it was while the policy trained. Each cell is the larger of mean and 99th
percentile of the differences, as a share of its limit for float32 and for bfloat16 on both sides:
from 1 on a push fails. Training is that of the paper's run and of the quickstart: ten steps on the
model's own samples with random advantages, the same in each, whose learning rate takes a weight as
far as Adam can in all steps of the run.

    python benchmarks/stale_weights.py
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from parity_limits import packed
from parity_models import SIZE, load, sample, save_random_model
from torch import Tensor
from transformers import PreTrainedModel

from trace_pl.models.experts import routers
from trace_pl.models.logprobs import sampled_logprobs
from trace_pl.models.names import BUILT_IN_BASE, resolve_model
from trace_pl.rollout.parity import ParityReport
from trace_pl.rollout.parity_limits import ParityLimits

RUNS = {"200 steps at 1e-6": 200 * 1e-6, "30 steps at 5e-4": 30 * 5e-4}
"""How far a weight moves at most."""
STEPS = 10
FORMATS = ("float32", "bfloat16")
PARTS = (
    "embed_tokens", "input_layernorm", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm",
    "gate_proj", "up_proj", "down_proj", "mlp.gate.weight", "experts.gate_up_proj",
    "experts.down_proj", "model.norm", "lm_head",
)  # fmt: skip


def trained(folder: str, distance: float, texts: Tensor) -> PreTrainedModel:
    """Return the model after some steps of AdamW that move weights by up to a distance."""
    model = load(folder)
    advantages = torch.tensor([1.0, -1.0]).repeat(len(texts) // 2)
    mask = torch.ones_like(texts, dtype=torch.bool)
    mask[:, 0] = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=distance / STEPS, weight_decay=0.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        logprobs = sampled_logprobs(model, texts, mask)
        # Clipped as a policy's ratio is: what has become unlikely is not pushed further.
        loss = -(advantages[:, None] * logprobs.clamp(min=-10.0)).sum() / mask.sum()
        loss.backward()
        optimizer.step()
    return model


def names(model: PreTrainedModel) -> Iterator[tuple[str, str, str]]:
    """Yield each kind of parameter, one of it in the middle layer, and the same a layer before."""
    found = dict(model.named_parameters())
    middle = model.config.get_text_config().num_hidden_layers // 2
    for part in PARTS:
        inside = f"layers.{middle}."
        fitting = [n for n in found if part in n and (inside in n or ".layers." not in n)]
        if fitting:
            yield part, fitting[0], fitting[0].replace(inside, f"layers.{middle - 1}.")


@torch.no_grad()
def share(policy: PreTrainedModel, engine: PreTrainedModel, name: str, wrong: Tensor,
          ids: list[int], expected: Tensor) -> float:  # fmt: skip
    """Return how far a wrong tensor takes the engine, as a share of what fails."""
    held = dict(engine.named_parameters())[name]
    right = held.clone()
    held.copy_(wrong)
    limits = ParityLimits.derived(
        {engine.dtype, policy.dtype},
        policy.config.get_text_config().num_hidden_layers,
        bool(routers(policy)),
    )
    report = ParityReport.of(packed(engine, ids), expected, limits)
    held.copy_(right)
    found = max(report.mean_abs_diff / limits.mean, report.high_abs_diff / limits.high)
    return float(f"{found:.3g}")


@torch.no_grad()
def examine(folder: str, policies: dict[str, PreTrainedModel]) -> dict[str, dict[str, list[float]]]:
    """Return the shares of every part and fault, one for each format."""
    ids = sample(folder, SIZE, seed=1)
    found: dict[str, dict[str, list[float]]] = {}
    initial = load(folder)
    before = dict(initial.named_parameters())
    for dtype in FORMATS:
        for run, trained_policy in policies.items():
            policy = copy.deepcopy(trained_policy).to(getattr(torch, dtype))  # type: ignore[arg-type]
            engine: Any = copy.deepcopy(policy)
            expected = packed(policy, ids)
            now = dict(policy.named_parameters())
            for part, name, other in names(policy):
                faults = {f"frozen for {run}": before[name]}
                if run == next(iter(policies)):
                    generator = torch.Generator().manual_seed(0)
                    order = torch.randperm(len(now[name]), generator=generator)
                    faults["rows in another order"] = now[name][order]
                    if other != name:
                        faults["another layer's"] = now[other]
                for fault, tensor in faults.items():
                    value = share(policy, engine, name, tensor, ids, expected)
                    found.setdefault(part, {}).setdefault(fault, []).append(value)
    return found


def main() -> None:
    """Examine a deep model, a mixture and the built-in base, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--model", default=BUILT_IN_BASE, help="a trained one")
    arguments = parser.parse_args()
    cases = {}
    for kind in ("dense", "experts", "trained"):
        with tempfile.TemporaryDirectory() as scratch:
            folder = scratch
            if kind == "trained":
                folder = resolve_model(arguments.model)
            else:
                save_random_model(folder, arguments.layers, kind == "experts", 0)
            texts = torch.tensor([sample(folder, 100, seed) for seed in range(4)])
            policies = {run: trained(folder, distance, texts) for run, distance in RUNS.items()}
            cases[kind] = examine(folder, policies)
        print(kind, json.dumps(cases[kind]), flush=True)
    caught = [shares for parts in cases.values() for faults in parts.values()
              for shares in faults.values()]  # fmt: skip
    print(
        json.dumps(
            {
                "name": "stale_weights",
                "ratio": round(sum(each[1] >= 1.0 for each in caught) / len(caught), 3),
                "ratio_float32": round(sum(each[0] >= 1.0 for each in caught) / len(caught), 3),
                "layers": arguments.layers,
                "cases": cases,
            }
        )
    )


if __name__ == "__main__":
    main()
