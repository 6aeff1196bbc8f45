"""Bytes that a forward and a backward pass need beside parameters."""

from __future__ import annotations

from dataclasses import dataclass

from trace_pl.commands.plan.shapes import ModelShape
from trace_pl.commands.plan.token_bytes import forward_bytes, training_bytes
from trace_pl.models.head import most_logit_bytes
from trace_pl.scoring.layout import BLOCK_TOKENS

_LOGIT = 4
"""Bytes of one logit, and of its gradient: the loss computes in float32."""
_ALIVE_CHUNKS = 3
"""A chunk's log-softmax, and in the backward pass the gradients of that and of its logits."""


@dataclass(frozen=True)
class Passes:
    """What a training forward and backward hold."""

    saved: float
    """Bytes kept from forward to backward."""
    peak: float
    """Bytes alive at the largest moment."""


def training_passes(
    shape: ModelShape,
    b: int,
    tokens: int,
    num_predicted: int,
    has_checkpointing: bool,
    is_autocast: bool = False,
    device_type: str = "cuda",
) -> Passes:
    """Return what one training forward and backward hold.

    The head is differentiated first, when all layers' tensors are kept, and the layers after it.

    Args:
        shape: Sizes of the model.
        b: Bytes of one number of the computation.
        tokens: Tokens read.
        num_predicted: Tokens whose log-prob is taken.
        has_checkpointing: Whether layers keep only their input.
        is_autocast: Whether float32 parameters and sums are cast to ``b`` bytes on use.
        device_type: Where it runs, which sets the size of a chunk of logits.
    """
    token = training_bytes(shape.blueprint, b, has_checkpointing, is_autocast).of(shape.layers)
    rows = chunk_rows(shape, device_type)
    is_chunked = num_predicted > rows
    chunk = _LOGIT * min(num_predicted, rows) * shape.vocab
    # Beside an adapter the head is frozen, and what it read is needed for its chunks alone.
    is_needed = is_chunked or not shape.counts.adapter
    read_by_head = num_predicted * b * shape.hidden
    kept = tokens * token.saved + is_needed * read_by_head
    # One chunk is kept as it is, several are computed again.
    kept_logits = 0 if is_chunked else chunk
    in_head = kept + _ALIVE_CHUNKS * chunk + is_chunked * read_by_head
    return Passes(kept + kept_logits, max(tokens * token.peak, in_head))


def chunk_rows(shape: ModelShape, device_type: str = "cuda") -> int:
    """Return the tokens whose logits make one chunk."""
    return max(1, most_logit_bytes(device_type) // (_LOGIT * shape.vocab))


def scoring_pass(
    shape: ModelShape, b: int, tokens: int, trajectory: int, branch_tokens: int
) -> float:
    """Return the bytes alive in the scoring forward of all boundaries.

    Args:
        shape: Sizes of the model.
        b: Bytes of one number of the computation.
        tokens: Tokens of the forward, branches included.
        trajectory: Tokens of one trajectory.
        branch_tokens: Tokens of its branches.
    """
    # A byte for each pair: a branch sees half of the trajectory on average, and its own block.
    pairs = branch_tokens * (trajectory / 2 + BLOCK_TOKENS)
    masks = pairs * tokens / (trajectory + branch_tokens)
    # Keys and values of all heads that a block sees, beside those of the whole row.
    seen = 2 * b * shape.heads * shape.head_dim * trajectory
    return tokens * forward_bytes(shape.blueprint, b) + masks + seen


def exchanged(shape: ModelShape, b: int) -> float:
    """Return the bytes that one token sends to its experts where ranks divide them, in one layer.

    What comes back is of the same size; it is kept for the backward pass.
    """
    return shape.top_k * b * shape.hidden
