"""Attention for rows of different lengths laid end to end, without padding between them.

Everything but attention works on single tokens, so a model may read many rows as one long one, as
long as attention keeps them apart. Registered with transformers under the name ``PACKED``; a model
loaded with it reads packed rows when its forward is given ``packed_rows`` (and the position of
every token), and everything else as it would with ``sdpa``.

It is a loop over rows, each served by torch's fused kernel, and not one call with a mask: a dense
mask over all rows grows with the square of their tokens, and FlexAttention's block masks have no
backward pass on CPU and are compiled anew for new shapes. A loop costs a kernel launch for each row
and layer, which is little beside rows of hundreds of tokens.

A row may carry branches: short continuations of several of its prefixes, each of which sees its
prefix and itself. That is how all boundaries of a trajectory are scored in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trace_pl.errors import ConfigError
from trace_pl.models.attention import attend
from trace_pl.privates import attention_of

PACKED = "trace_packed"
"""Value of ``attn_implementation``."""


@dataclass(frozen=True, eq=False)
class BranchBlock:
    """Branch tokens that attend together: Q tokens, to the first S of the row and to themselves."""

    num_seen: int
    """S."""
    mask_QK: Tensor
    """(Q, S + Q) bool, true where a token may look."""


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One row: tokens that attend causally, then the blocks of its branches."""

    trunk_length: int
    blocks: tuple[BranchBlock, ...] = ()

    def to(self, device: torch.device) -> PackedRow:
        """Return a copy whose masks lie on ``device``."""
        blocks = [BranchBlock(b.num_seen, b.mask_QK.to(device)) for b in self.blocks]
        return PackedRow(self.trunk_length, tuple(blocks))

    def __len__(self) -> int:
        """Return the tokens of the row, branches included."""
        return self.trunk_length + sum(len(block.mask_QK) for block in self.blocks)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed_rows: Sequence[PackedRow] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within each row; the signature is that of transformers' attention functions.

    Args:
        module: The attention layer.
        query: (1, H, L, D), L tokens of all rows.
        key: (1, H_kv, L, D).
        value: (1, H_kv, L, D).
        attention_mask: Used only without ``packed_rows``.
        dropout: Probability of dropping an attention weight.
        scaling: Factor on the scores.
        packed_rows: The rows, in order.
        kwargs: Further arguments that a model hands on.

    Returns:
        (1, L, H, D), and no attention weights.
    """
    if packed_rows is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    attend_here = partial(attend, dropout=dropout, scale=scaling)
    # Split rather than slice: the gradient of a slice is as large as what it was cut from.
    lengths = [len(row) for row in packed_rows]
    split = (x.split(lengths, dim=2) for x in (query, key, value))
    parts = [
        part
        for row, q, k, v in zip(packed_rows, *split, strict=True)
        for part in _attend_within(row, q, k, v, attend_here)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _attend_within(
    row: PackedRow, q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Tensor]
) -> Iterator[Tensor]:
    """Yield the outputs of a row's trunk and of each of its blocks."""
    if not row.blocks:
        yield attend(q, k, v)
        return
    start = row.trunk_length
    yield attend(q[:, :, :start], k[:, :, :start], v[:, :, :start])
    for block in row.blocks:
        stop = start + len(block.mask_QK)
        seen_k, seen_v = (
            torch.cat([x[:, :, : block.num_seen], x[:, :, start:stop]], dim=2) for x in (k, v)
        )
        yield attend(q[:, :, start:stop], seen_k, seen_v, block.mask_QK)
        start = stop


def require_packed_attention(model: PreTrainedModel) -> None:
    """Raise unless a model keeps packed rows apart.

    Raises:
        ConfigError: if it was loaded with another attention, or has layers with another one.
    """
    # Another attention would silently ignore the rows, and every row would see those before it.
    attention = attention_of(model.config)
    if attention != PACKED:
        raise ConfigError(
            f"Expected a model with attention '{PACKED}', got '{attention}'. Load it with "
            "trace_pl.models.load_model, or call set_attn_implementation on it."
        )
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"Expected a model with full attention in every layer, got {sorted(kinds)}. "
            "Models with sliding windows or linear attention are not supported."
        )


def _mask(
    *, q_length: int, kv_length: int, attention_mask: Tensor | None, **kwargs: Any
) -> Tensor | None:
    """Return the mask of ``sdpa``, and none for packed rows, which transformers would mask too."""
    if attention_mask is None and q_length == kv_length:
        return None
    mask: Tensor | None = sdpa_mask(
        q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs
    )
    return mask


# Compiled, the loop over rows would be unrolled, and compiled anew for every number of rows.
AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
AttentionMaskInterface.register(PACKED, _mask)
