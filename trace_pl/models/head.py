"""Log-probs of given tokens, computed without materialising full logits.

The logits of M rows over a vocabulary of V take 4 M V bytes, and their gradient as much again: for
4,096 rows and 151,936 tokens 2.5 GB each. Here the vocabulary head is applied to a few rows at a
time and, for the gradient, once more in the backward pass, so only one chunk is ever alive.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

LOGIT_BYTES = 48 * 2**20
"""Most bytes of float32 logits alive at a time (48 MiB). With blocks below 32 MiB glibc's heap
fragments, and every chunk's memory stays with the process: the peak is then ten times as high."""


def token_logprobs(
    head: nn.Module, hidden_MD: Tensor, targets_M: Tensor, logit_bytes: int = LOGIT_BYTES
) -> Tensor:
    """Return the log-prob of one given token for each row.

    Args:
        head: The vocabulary head, (M, D) to (M, V).
        hidden_MD: Last hidden states of the rows that predict the tokens.
        targets_M: (M,) int64, the tokens.
        logit_bytes: Most bytes of float32 logits alive at a time; one row at least.

    Returns:
        (M,) float32 in nats, at temperature 1. The gradient reaches ``hidden_MD`` and the head; it
        is defined, and zero, when there are no rows.
    """
    weight_VD = head.weight
    assert isinstance(weight_VD, Tensor)
    rows = max(1, logit_bytes // (4 * len(weight_VD)))
    if len(targets_M) <= rows:
        return _logprobs(head, hidden_MD, targets_M)
    parts = zip(hidden_MD.split(rows), targets_M.split(rows), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([_logprobs(head, *part) for part in parts])
    return torch.cat(
        [
            # The head draws no random numbers, so their state need not be kept.
            checkpoint(_logprobs, head, *part, use_reentrant=False, preserve_rng_state=False)
            for part in parts
        ]
    )


def _logprobs(head: nn.Module, hidden_MD: Tensor, targets_M: Tensor) -> Tensor:
    return -F.cross_entropy(head(hidden_MD).float(), targets_M, reduction="none")
