"""Peak memory of log-probs and their gradient over a large vocabulary: chunked head, full logits.

Each way runs in a process of its own; its peak is the growth of the resident set over what the
inputs take. The gradients of both are compared first, on fewer rows.

    python benchmarks/logprob_memory.py --rows 4096 --vocab 151936 --width 128
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor, nn

from trace_pl.models.head import token_logprobs


def full_logits(head: nn.Module, hidden_MD: Tensor, targets_M: Tensor) -> Tensor:
    """Return log-probs as trainers do without a special head: from all float32 logits at once."""
    logits_MV = head(hidden_MD).float()
    return logits_MV.log_softmax(-1).gather(1, targets_M[:, None])[:, 0]


WAYS: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "chunked": token_logprobs,
    "full": full_logits,
}


def make_inputs(rows: int, vocab: int, width: int) -> tuple[nn.Linear, Tensor, Tensor]:
    """Return a head, hidden states and targets."""
    torch.manual_seed(0)
    head = nn.Linear(width, vocab, bias=False)
    return head, torch.randn(rows, width, requires_grad=True), torch.randint(vocab, (rows,))


def measure(way: str, rows: int, vocab: int, width: int) -> tuple[float, float]:
    """Return peak bytes beyond the inputs, and seconds, of one forward and backward."""
    head, hidden, targets = make_inputs(rows, vocab, width)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = perf_counter()
    WAYS[way](head, hidden, targets).mean().backward()
    seconds = perf_counter() - start
    return 1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before), seconds


def gradient_error(vocab: int, width: int) -> float:
    """Return the largest relative difference of the gradients, on 512 rows."""
    found = []
    for way in WAYS.values():
        head, hidden, targets = make_inputs(512, vocab, width)
        way(head, hidden, targets).mean().backward()
        assert hidden.grad is not None
        assert head.weight.grad is not None
        found.append((hidden.grad, head.weight.grad))
    return max(
        float((one - other).norm() / other.norm()) for one, other in zip(*found, strict=True)
    )


def main() -> None:
    """Measure both ways and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4_096)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=128)
    sizes = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    found = {}
    for way in WAYS:
        with context.Pool(1) as pool:
            found[way] = pool.apply(measure, (way, sizes.rows, sizes.vocab, sizes.width))
    (chunked, chunked_s), (full, full_s) = found["chunked"], found["full"]
    print(
        json.dumps(
            {
                "name": "logprob_memory",
                "ratio": round(chunked / full, 4),
                "chunked_mib": round(chunked / 2**20),
                "full_mib": round(full / 2**20),
                "full_logits_mib": round(4 * sizes.rows * sizes.vocab / 2**20),
                "time_ratio": round(chunked_s / full_s, 3),
                "gradient_error": gradient_error(sizes.vocab, sizes.width),
                **vars(sizes),
            }
        )
    )


if __name__ == "__main__":
    main()
