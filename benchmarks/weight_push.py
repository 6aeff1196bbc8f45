"""A weight push as tensors, or through files: saving the policy and loading it into the engine.

A new engine that loads the files is timed as well: what is left where a running one cannot load.
So is the way through files to a server, in bfloat16, one file after the other, without the server.

Each model runs in a process of its own with a real vLLM; before every push all weights change, and
after it log-probs of a fixed prompt are compared on both sides. The peak of a push is how much the
resident set grows over what it was before. Files lie in the temporary folder and are not flushed,
so a slow disk may not show; packing for the CPU's kernels takes most of a push.

    python benchmarks/weight_push.py --layers 12 --width 768 --vocab 32768
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import safetensors.torch
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from trace_pl.engines.server.weight_files import WeightFiles
from trace_pl.engines.vllm.engine import VLLMEngine
from trace_pl.models.loading import load_model
from trace_pl.models.names import BUILT_IN_BASE, resolve_model
from trace_pl.models.weights import policy_tensors
from trace_pl.rollout.parity import check_parity

PROMPT = range(3, 131)


def save_random_model(folder: str, layers: int, width: int, vocab: int) -> None:
    """Save a random Qwen3 with a head of its own."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        max_position_embeddings=2048,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def peak_mib(action: Callable[[], None]) -> float:
    """Return how far the resident set grows while something runs, in MiB."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now
    before = _status("VmRSS")
    action()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def change(policy: PreTrainedModel) -> None:
    """Move every weight by about 1 %."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.0 + 0.02 * (torch.rand(1) - 0.5))


def files_gb_s(policy: PreTrainedModel) -> float:
    """Return GB/s of bfloat16 weights that are written to files, read and parsed as servers do."""
    size = sum(p.numel() * 2 for _, p in policy_tensors(policy))
    with tempfile.TemporaryDirectory() as folder:
        start = perf_counter()
        for path in WeightFiles().write(policy_tensors(policy), Path(folder), torch.bfloat16):
            safetensors.torch.load(path.read_bytes())
        return size / (perf_counter() - start) / 1e9


def measure(folder: str, rounds: int) -> dict[str, Any]:
    """Return seconds and peaks of each way with the model in ``folder``."""
    torch.set_num_threads(1)
    policy = load_model(folder)
    engine = VLLMEngine(folder, 256, 8, kv_cache_gib=0.25, num_threads=1)
    seconds: dict[str, list[float]] = {"push": [], "save": [], "reload": [], "restart": []}
    peaks: dict[str, list[float]] = {"push": [], "listed": []}
    parity = []
    vllm = engine._engine

    def push() -> None:
        engine.push_weights(policy_tensors(policy), version=1)

    def push_a_list() -> None:
        copies = [(name, tensor.clone()) for name, tensor in policy_tensors(policy)]
        engine.push_weights(copies, version=1)

    def reload(path: str) -> None:
        vllm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        vllm.reset_prefix_cache()

    with tempfile.TemporaryDirectory() as saved:
        ways = {
            "push": push,
            "save": lambda: policy.save_pretrained(saved),
            "reload": lambda: reload(saved),
        }
        for _ in range(rounds + 1):  # the first one warms up
            change(policy)
            for way, action in ways.items():
                start = perf_counter()
                action()
                seconds[way].append(perf_counter() - start)
                if way == "push":
                    parity.append(check_parity(engine, policy, PROMPT, 1e-3).max_abs_diff)
        for way, action in (("push", push), ("listed", push_a_list)):
            peaks[way] = [peak_mib(action) for _ in range(3)]
    push()
    parity.append(check_parity(engine, policy, PROMPT, 1e-3).max_abs_diff)
    engine.close()
    for _ in range(2):  # the first one warms up
        start = perf_counter()
        VLLMEngine(folder, 256, 8, kv_cache_gib=0.25, num_threads=1).close()
        seconds["restart"].append(perf_counter() - start)
    best = {way: median(values[1:]) for way, values in seconds.items()}
    return {
        "parameters": sum(p.numel() for p in policy.parameters()),
        "model_mib": round(sum(p.nbytes for p in policy.parameters()) / 2**20),
        "ratio": round((best["save"] + best["reload"]) / best["push"], 2),
        "ratio_to_restart": round((best["save"] + best["restart"]) / best["push"], 1),
        "ratio_to_reload": round(best["reload"] / best["push"], 2),
        "push_mib_above": round(max(peaks["push"])),
        "copied_push_mib_above": round(max(peaks["listed"])),
        "parity_nats": max(parity),
        "files_gb_s": round(median(files_gb_s(policy) for _ in range(rounds)), 2),
        **{f"{way}_s": round(value, 4) for way, value in best.items()},
    }


def main() -> None:
    """Measure both models and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(folder, arguments.layers, arguments.width, arguments.vocab)
        found = []
        for path in (resolve_model(BUILT_IN_BASE), folder):
            with context.Pool(1) as pool:
                found.append(pool.apply(measure, (path, arguments.rounds)))
    tiny, wide = found
    print(
        json.dumps(
            {
                "name": "weight_push",
                "ratio": wide["ratio"],
                "wide": wide,
                "tiny": tiny,
                **vars(arguments),
            }
        )
    )


if __name__ == "__main__":
    main()
