"""Log-probs of given tokens, computed without materialising full logits.

The logits of M rows over a vocabulary of V take 4 M V bytes, and their gradient as much again: for
4,096 rows and 151,936 tokens 2.5 GB each. Here the vocabulary head is applied to a few rows at a
time and, for the gradient, once more in the backward pass, so only one chunk is ever alive.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_MIB = 2**20


def most_logit_bytes(device_type: str) -> int:
    """Return the most bytes of float32 logits that one chunk takes on a kind of device.

    On a CPU, blocks below 32 MiB fragment glibc's heap, and every chunk's memory stays with the
    process: the peak is then ten times as high. On a GPU a chunk has to be large beside the head
    itself, which is read, and whose gradient is added to, once for each.
    """
    return (48 if device_type == "cpu" else 512) * _MIB


def token_logprobs(
    head: nn.Module, hidden_MD: Tensor, targets_M: Tensor, logit_bytes: int | None = None
) -> Tensor:
    """Return the log-prob of one given token for each row.

    Args:
        head: The vocabulary head, (M, D) to (M, V).
        hidden_MD: Last hidden states of the rows that predict the tokens.
        targets_M: (M,) int64, the tokens.
        logit_bytes: Most bytes of float32 logits alive at a time; one row at least. None takes
            those of :func:`most_logit_bytes`.

    Returns:
        (M,) float32 in nats, at temperature 1. The gradient reaches ``hidden_MD`` and the head; it
        is defined, and zero, when there are no rows.
    """
    weight_VD = head.weight
    assert isinstance(weight_VD, Tensor)
    logit_bytes = logit_bytes or most_logit_bytes(hidden_MD.device.type)
    rows = max(1, logit_bytes // (4 * len(weight_VD)))
    if len(targets_M) <= rows:
        return _logprobs(head, hidden_MD, targets_M)
    logprobs_M: Tensor = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        head, rows, hidden_MD, targets_M, *_trained(head)
    )
    return logprobs_M


class _ChunkedLogprobs(torch.autograd.Function):
    """Computes each chunk's logits again for the gradient, and sums up the head's in float32.

    Left to autograd, the chunks' gradients would be summed up in the head's own number format: over
    150 chunks in bfloat16 that is off by 1 %, where one piece is off by 0.3 %.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        head: nn.Module,
        rows: int,
        hidden_MD: Tensor,
        targets_M: Tensor,
        *trained: Tensor,
    ) -> Tensor:
        """Return the log-probs; ``trained`` are the head's parameters, which autograd must see."""
        ctx.head, ctx.rows = head, rows
        device = hidden_MD.device.type
        ctx.precision = partial(
            torch.autocast,
            device,
            torch.get_autocast_dtype(device),
            torch.is_autocast_enabled(device),
        )
        ctx.save_for_backward(hidden_MD, targets_M)
        chunks = zip(hidden_MD.split(rows), targets_M.split(rows), strict=True)
        return torch.cat([_logprobs(head, *chunk) for chunk in chunks])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_M: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Return the gradients of hidden states and head."""
        chunks = zip(*(x.split(ctx.rows) for x in (*ctx.saved_tensors, gradient_M)), strict=True)
        trained = _trained(ctx.head)
        sums = [torch.zeros_like(p, dtype=_sum_dtype(p)) for p in trained]
        of_hidden = [_chunk_gradient(ctx, sums, *chunk) for chunk in chunks]
        of_head = [total.to(p.dtype) for total, p in zip(sums, trained, strict=True)]
        return None, None, torch.cat(of_hidden), None, *of_head


def _chunk_gradient(
    ctx: Any,  # noqa: ANN401
    sums: list[Tensor],
    hidden_MD: Tensor,
    targets_M: Tensor,
    gradient_M: Tensor,
) -> Tensor:
    """Return the gradient of a chunk's hidden states, and add those of the head to sums."""
    leaf_MD = hidden_MD.detach().requires_grad_()
    with torch.enable_grad(), ctx.precision():
        logprobs_M = _logprobs(ctx.head, leaf_MD, targets_M)
    found, *parts = torch.autograd.grad(logprobs_M, (leaf_MD, *_trained(ctx.head)), gradient_M)
    for total, part in zip(sums, parts, strict=True):
        total += part
    return found


def _logprobs(head: nn.Module, hidden_MD: Tensor, targets_M: Tensor) -> Tensor:
    return -F.cross_entropy(head(hidden_MD).float(), targets_M, reduction="none")


def _trained(head: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in head.parameters() if parameter.requires_grad]


def _sum_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)
