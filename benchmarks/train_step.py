"""A training step over rollouts of very different lengths: packed rows, or padded batches.

Forward, loss and backward of the same rows with the same random Qwen3. Packed is what the trainer
does. Padded batches take the rows as they come, eight at a time, as most trainers do; sorted ones
first order them by length. Rounds alternate between the ways, the least seconds of each count. The
gradients of all ways are compared.

    python benchmarks/train_step.py --rows 64 --longest 1024
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from probe import VOCAB, make_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedModel

from trace_pl.models.head import token_logprobs
from trace_pl.models.logprobs import sampled_logprobs
from trace_pl.models.packing import bins_within

SAMPLED_SHARE = 0.3


def make_rows(count: int, longest: int) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and masks of rows whose lengths are uniform between 1/16 and all of longest."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in torch.randint(longest // 16, longest + 1, (count,), generator=generator).tolist():
        mask = torch.rand(length, generator=generator) < SAMPLED_SHARE
        mask[0] = False
        rows.append((torch.randint(VOCAB, (length,), generator=generator), mask))
    return rows


def collate(rows: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return right-padded tokens and masks."""
    ids, masks = zip(*rows, strict=True)
    return pad_sequence(list(ids), batch_first=True), pad_sequence(list(masks), batch_first=True)


def padded_logprobs(model: PreTrainedModel, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the log-probs of masked tokens, reading the padding as well."""
    hidden = model.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state
    predicts = mask_BT[:, 1:]
    return token_logprobs(model.lm_head, hidden[:, :-1][predicts], ids_BT[:, 1:][predicts])


def step(
    model: PreTrainedModel,
    batches: Sequence[tuple[Tensor, Tensor]],
    logprobs: Callable[[PreTrainedModel, Tensor, Tensor], Tensor],
) -> float:
    """Return the seconds of one step; its gradient stays in the model."""
    model.zero_grad()
    start = perf_counter()
    for ids, mask in batches:
        (-logprobs(model, ids, mask).sum()).backward()
    return perf_counter() - start


def main() -> None:
    """Measure all ways and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = make_rows(arguments.rows, arguments.longest)
    by_length = sorted(rows, key=lambda row: len(row[0]))
    bins = bins_within([len(ids) for ids, _ in rows], 8 * arguments.longest)
    ways = {
        "packed": ([collate([rows[i] for i in b]) for b in bins], sampled_logprobs),
        "padded": ([collate(rows[i : i + 8]) for i in range(0, len(rows), 8)], padded_logprobs),
        "sorted": (
            [collate(by_length[i : i + 8]) for i in range(0, len(rows), 8)],
            padded_logprobs,
        ),
    }
    model = make_model(arguments.layers, arguments.width).train()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    gradients = {}
    for _ in tqdm(range(arguments.rounds + 1), desc="rounds"):  # the first one warms up
        for way, (batches, logprobs) in ways.items():
            seconds[way].append(step(model, batches, logprobs))
            gradients[way] = torch.cat([p.grad.flatten() for p in model.parameters()])
    best = {way: min(values[1:]) for way, values in seconds.items()}
    tokens = sum(len(ids) for ids, _ in rows)
    print(
        json.dumps(
            {
                "name": "train_step",
                "ratio": round(best["padded"] / best["packed"], 2),
                "ratio_to_sorted": round(best["sorted"] / best["packed"], 2),
                "padding": {
                    way: round(sum(ids.numel() for ids, _ in ways[way][0]) / tokens - 1, 3)
                    for way in ("padded", "sorted")
                },
                "gradient_error": max(
                    float((gradients[way] - gradients["padded"]).norm())
                    / float(gradients["padded"].norm())
                    for way in ways
                ),
                "tokens": tokens,
                **vars(arguments),
            }
        )
    )


if __name__ == "__main__":
    main()
