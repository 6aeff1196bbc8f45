"""The log-probs that a model gives to sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from trace_pl.models.packed_attention import PackedRow
from trace_pl.models.packed_forward import packed_logprobs


def sampled_logprobs(model: PreTrainedModel, token_ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the model's log-prob of each masked token given all tokens before it.

    Rows are read end to end without their padding, each up to its last masked token; the vocabulary
    head runs on the tokens that predict a masked one.

    Args:
        model: A transformers causal language model with packed attention.
        token_ids_BT: (B, T) int64, right-padded.
        mask_BT: (B, T) bool; the first column must be false.

    Returns:
        (B, T) float32 in nats, zero off the mask. It depends on the parameters even when the mask
        is empty, so an empty micro-batch still has a (zero) gradient.
    """
    places_T = torch.arange(token_ids_BT.shape[1], device=mask_BT.device)
    is_read_BT = read_mask(mask_BT)
    picked_M = packed_logprobs(
        model,
        token_ids_BT[is_read_BT],
        places_T.expand_as(token_ids_BT)[is_read_BT],
        [PackedRow(length) for length in is_read_BT.sum(dim=1).tolist()],
        F.pad(mask_BT[:, 1:], (0, 1))[is_read_BT],
        token_ids_BT[mask_BT],
    )
    return picked_M.new_zeros(mask_BT.shape).masked_scatter(mask_BT, picked_M)


def read_mask(mask_BT: Tensor) -> Tensor:
    """Return (B, T) bool, true on the tokens that :func:`sampled_logprobs` reads.

    The last masked token of a row is predicted and not read; a row without one is read for one
    token.
    """
    places_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    lengths_B = (places_T * mask_BT).amax(dim=1).clamp(min=1)
    return places_T < lengths_B[:, None]
