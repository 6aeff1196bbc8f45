"""How far two right computations of the same log-probs are apart, by number format and depth.

Random Qwen3 and Qwen3-MoE models, whose head is scaled until they are as sure as a language model,
read tokens that they sampled. The trainer's forward in float32 and bfloat16 is compared with
transformers' plain attention, with a real vLLM, and with the other format. Each figure is fitted as
``factor * layers ** power``, the factor so that nothing measured lies above; the limits that
``trace_pl.rollout.parity_limits`` derives are a multiple of that.

A float32 engine that multiplies in TF32 must be told from a right one: matrix products of inputs
rounded to 10 bits of mantissa stand for it. In float32 a mixture sends a token to another expert
once in thousands, so what that costs is measured with four such tokens.

    python benchmarks/parity_limits.py
    python benchmarks/parity_limits.py --model FOLDER     # a trained one, with text of its own
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from parity_models import SIZE, eager, load, sample, save_random_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from trace_pl.engines.vllm.engine import VLLMEngine
from trace_pl.models.experts import routers
from trace_pl.models.logprobs import sampled_logprobs
from trace_pl.models.names import BUILT_IN_BASE, resolve_model
from trace_pl.rollout.parity import ParityReport
from trace_pl.rollout.parity_limits import ParityLimits

HALF = "bfloat16"
FIGURES = ("mean", "p99", "max")
PAIRS = {
    "float32": (("float32", "float32 plain"), ("float32", "float32 vllm")),
    "float32, 4 tokens to other experts": (("float32 plain", "rerouted"),),
    HALF: (
        ("float32", HALF),
        ("float32", f"{HALF} vllm"),
        (HALF, f"{HALF} plain"),
        (HALF, f"{HALF} vllm"),
        (f"{HALF} vllm", "float32 router"),
        (f"{HALF} plain", "float32 router"),
    ),
    "TF32 attention": (("float32", "TF32 attention"),),
    "TF32": (("float32", "TF32"),),
}
"""What is compared with what; the name says what the difference is due to."""


class Rounded(TorchFunctionMode):
    """Rounds what functions multiply to the 10 bits of mantissa that TF32 keeps."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        super().__init__()
        self.functions = functions

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Round the arguments of these functions, and call."""
        if func in self.functions:
            args = [to_tf32(value) for value in args]
        return func(*args, **(kwargs or {}))


def to_tf32(value: Any) -> Any:  # noqa: ANN401
    """Return a float32 tensor rounded to nearest, and anything else as it is."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return value
    bits = value.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def reroute(model: PreTrainedModel, num_tokens: int, length: int) -> ExitStack:
    """Send some tokens, each in another layer, to the next best in place of their last expert."""
    generator = torch.Generator().manual_seed(1)
    hooks = ExitStack()
    gates = routers(model)
    for place in torch.randint(length, (num_tokens,), generator=generator).tolist():
        gate: Any = gates[int(torch.randint(len(gates), (1,), generator=generator))]

        def swap(
            router: Any,  # noqa: ANN401
            inputs: object,
            outputs: tuple[Tensor, Tensor, Tensor],
            place: int = place,
        ) -> tuple[Tensor, Tensor, Tensor]:
            logits, scores, experts = (each.clone() for each in outputs)
            best = logits[place].topk(router.top_k + 1)
            kept = best.indices[[*range(router.top_k - 1), router.top_k]]
            experts[place] = kept
            scores[place] = logits[place, kept].softmax(-1)
            return logits, scores, experts

        hooks.callback(gate.register_forward_hook(swap).remove)
    return hooks


def keep_routers(model: PreTrainedModel) -> None:
    """Compute the routers of a model in float32."""
    for gate in routers(model):
        nn.Module.float(gate)
        gate.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
        gate.register_forward_hook(lambda _, __, out: (out[0], out[1].to(torch.bfloat16), out[2]))


def packed(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Return the log-probs as the trainer computes them."""
    row = torch.tensor([list(ids)])
    mask = torch.ones_like(row, dtype=torch.bool)
    mask[:, 0] = False
    return sampled_logprobs(model, row, mask)[0, 1:].float()


def plain(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Return them by transformers' own forward with its plain attention."""
    row = torch.tensor(ids)
    logprobs = model(row[None]).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, row[1:, None])[:, 0]


@torch.no_grad()
def ways(folder: str, ids: Sequence[int]) -> dict[str, Tensor]:
    """Return the log-probs of the tokens by every computation."""
    found = {}
    for dtype in ("float32", HALF):
        found[dtype] = packed(load(folder, dtype), ids)
        model = eager(folder, dtype)
        found[f"{dtype} plain"] = plain(model, ids)
        if dtype == "float32":
            with Rounded(torch.matmul):
                found["TF32 attention"] = plain(model, ids)
            with Rounded(torch.matmul, F.linear):
                found["TF32"] = plain(model, ids)
        if routers(model) and dtype == "float32":
            with reroute(model, 4, len(ids)):
                found["rerouted"] = plain(model, ids)
        if routers(model) and dtype == HALF:
            keep_routers(model)
            found["float32 router"] = plain(model, ids)
        engine = VLLMEngine(folder, 1024, 4, kv_cache_gib=0.25, dtype=dtype, num_threads=1)  # type: ignore[arg-type]
        found[f"{dtype} vllm"] = engine.prompt_logprobs(ids)
        engine.close()
    return found


def differences(found: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return mean, 99th percentile and maximum by cause, the largest of all pairs."""
    nowhere = ParityLimits.of_tolerance(math.inf)
    by_cause = {}
    for cause, pairs in PAIRS.items():
        reports = [
            ParityReport.of(found[a], found[b], nowhere)
            for a, b in pairs
            if a in found and b in found
        ]
        if reports:
            worst = (
                max(r.mean_abs_diff for r in reports),
                max(r.high_abs_diff for r in reports),
                max(r.max_abs_diff for r in reports),
            )
            by_cause[cause] = [float(f"{nats:.3g}") for nats in worst]
    return by_cause


def fit(layers: Sequence[int], values: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the power of the means, and the factor of each figure above all that was measured."""
    depth = torch.tensor(layers).double().log()
    logs = torch.tensor(values).double().log()
    centred = depth - depth.mean()
    power = max(0.0, float((centred * logs[:, 0]).sum() / centred.square().sum()))
    factors = (logs - power * depth[:, None]).amax(0).exp().tolist()
    fitted = zip((*FIGURES, "power"), (*factors, power), strict=True)
    return {name: float(f"{value:.3g}") for name, value in fitted}


def main() -> None:
    """Measure, fit and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 8, 16, 32])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--model", nargs="*", default=[BUILT_IN_BASE], help="trained models")
    arguments = parser.parse_args()
    measured: dict[tuple[str, str], list[tuple[int, list[float]]]] = defaultdict(list)
    cases = []
    for kind in ("dense", "experts"):
        for layers in arguments.layers:
            for seed in range(arguments.seeds):
                with tempfile.TemporaryDirectory() as folder:
                    save_random_model(folder, layers, kind == "experts", seed)
                    found = differences(ways(folder, sample(folder, SIZE)))
                for cause, figures in found.items():
                    measured[kind, cause].append((layers, figures))
                cases.append({"kind": kind, "layers": layers, "seed": seed, **found})
                print(cases[-1], flush=True)
    for name in arguments.model:
        folder = resolve_model(name)
        layers = load(folder).config.get_text_config().num_hidden_layers
        found = differences(ways(folder, sample(folder, SIZE)))
        cases.append({"kind": f"trained: {name}", "layers": layers, "seed": 0, **found})
        print(cases[-1], flush=True)
    fits = {f"{kind}, {cause}": fit(*zip(*seen, strict=True)) for (kind, cause), seen in
            measured.items()}  # fmt: skip
    dense = fits["dense, float32"], fits["dense, TF32 attention"]
    print(
        json.dumps(
            {
                "name": "parity_limits",
                "ratio": round(dense[1]["mean"] / dense[0]["mean"]),
                "tokens": SIZE,
                "fits": fits,
                "cases": cases,
            }
        )
    )


if __name__ == "__main__":
    main()
