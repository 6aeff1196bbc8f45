"""Bytes that forward and backward passes need beside parameters: one count for each saved tensor.

The counts follow the operations of transformers' Qwen3, Qwen3-MoE and Llama layers under packed
attention. A tensor that two operations save is counted once. Sizes are for each token; ``b`` is the
bytes of one number of the computation. Norms and the loss compute in float32 (4 bytes).
"""

from __future__ import annotations

from dataclasses import dataclass

from trace_pl.commands.plan.shapes import ModelShape
from trace_pl.models.head import LOGIT_BYTES
from trace_pl.scoring.layout import BLOCK_TOKENS

FLOAT32, INT64 = 4, 8
"""Bytes of one number."""
_SAVED_OF_HEADS = 5
"""Tensors as wide as all heads: queries, keys and values, the output of the kernel, and the same in
one piece for the projection that follows."""
_ROUTING = 4 * INT64 + FLOAT32
"""For each expert that a token visits: its number, three orders of the visits, and its weight."""


@dataclass(frozen=True)
class Passes:
    """What a training forward and backward hold at their largest moment."""

    saved: float
    """Bytes kept from forward to backward."""
    working: float
    """Bytes alive beyond those at the largest moment; below zero where much of them is gone."""

    @property
    def peak(self) -> float:
        """Bytes of both."""
        return self.saved + self.working


def layer_saved(shape: ModelShape, b: int) -> float:
    """Return the bytes that one layer keeps for its backward pass, for each token."""
    d, q, kv = shape.hidden, _width(shape.heads, shape), _width(shape.kv_heads, shape)
    norms = 2 * _norm_saved(d, b) + 2 * b * d  # the outputs are what the projections read
    if shape.has_qk_norm:
        norms += _norm_saved(q + kv, b) + FLOAT32 * (shape.heads + shape.kv_heads)
    attention = _SAVED_OF_HEADS * b * q + FLOAT32 * shape.heads  # and the sum of each softmax
    return norms + attention + _feed_forward_saved(shape, b)


def layer_working(shape: ModelShape, b: int) -> float:
    """Return the bytes that a layer's backward pass holds beyond what was saved, for each token.

    It is largest in the feed-forward part, which comes first, or in the attention, when what the
    feed-forward part saved is gone.
    """
    d, q = shape.hidden, _width(shape.heads, shape)
    inner = 2 * b * shape.ffn
    if shape.experts:
        inner = shape.top_k * b * (2 * d)
    gone = _feed_forward_saved(shape, b) + _norm_saved(d, b) + b * d
    return max(b * d + inner, 3 * b * q - gone)


def forward_working(shape: ModelShape, b: int) -> float:
    """Return the bytes alive in a forward pass without gradients, for each token."""
    d, q, kv = shape.hidden, _width(shape.heads, shape), _width(shape.kv_heads, shape)
    inner = 3 * b * shape.ffn
    if shape.experts:
        inner = shape.top_k * b * (2 * d + 3 * shape.expert_ffn)
    return 3 * b * d + max(inner, b * (6 * q + 2 * kv))


def exchanged(shape: ModelShape, b: int) -> float:
    """Return the bytes that one token sends to its experts where ranks divide them, in one layer.

    What comes back is of the same size; it is kept for the backward pass.
    """
    return shape.top_k * b * shape.hidden


def training_passes(
    shape: ModelShape,
    b: int,
    tokens: int,
    num_predicted: int,
    has_checkpointing: bool,
    is_autocast: bool = False,
) -> Passes:
    """Return what one training forward and backward hold.

    Args:
        shape: Sizes of the model.
        b: Bytes of one number of the computation.
        tokens: Tokens read.
        num_predicted: Tokens whose log-prob is taken.
        has_checkpointing: Whether layers keep only their input.
        is_autocast: Whether float32 parameters and sums are cast to ``b`` bytes on use.
    """
    d = shape.hidden
    layer = layer_saved(shape, b) + is_autocast * _casts_saved(shape, b)
    stream = FLOAT32 if is_autocast else b  # bytes of what runs from layer to layer
    kept = stream * d if has_checkpointing else layer
    positions = 2 * b * shape.head_dim + 2 * INT64  # cosine and sine; ids read and predicted
    behind = tokens * _norm_saved(d, b) + num_predicted * b * d  # gone when the last layer begins
    layers = tokens * (shape.layers * kept + positions) + behind
    again = (
        layer - b * d * (b == FLOAT32) if has_checkpointing else 0
    )  # in float32 its input is kept
    in_layer = tokens * (layer_working(shape, b) + again) - behind
    # One chunk is kept as it is, several are computed again. A chunk is its log-softmax, and in the
    # backward pass the gradients of that and of the logits, all float32.
    rows = max(1, LOGIT_BYTES // (FLOAT32 * shape.vocab))
    chunk = FLOAT32 * min(num_predicted, rows) * shape.vocab
    kept_logits = chunk if num_predicted <= rows else 0
    return Passes(layers + kept_logits, max(in_layer, 3 * chunk) - kept_logits)


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
    seen = 2 * b * _width(shape.heads, shape) * trajectory  # keys and values that a block sees
    return tokens * forward_working(shape, b) + masks + seen


def _feed_forward_saved(shape: ModelShape, b: int) -> float:
    if not shape.experts:
        return 4 * b * shape.ffn  # gate, its activation, up, and their product
    visited = 2 * b * shape.hidden + 4 * b * shape.expert_ffn + _ROUTING
    return shape.top_k * visited + FLOAT32 * shape.experts  # and the router's probabilities


def _casts_saved(shape: ModelShape, b: int) -> float:
    """Each of five projections casts its own input; norms keep their values in float32."""
    widths = _width(shape.heads, shape) + _width(shape.kv_heads, shape)
    return (3 * b + 2 * (FLOAT32 - b)) * shape.hidden + (FLOAT32 - b) * widths


def _norm_saved(width: int, b: int) -> float:
    """Input in float32 and the normalised values; in float32 the input is saved as it is."""
    return (FLOAT32 + b) * width


def _width(heads: int, shape: ModelShape) -> int:
    return heads * shape.head_dim
