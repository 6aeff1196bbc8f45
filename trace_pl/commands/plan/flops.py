"""Arithmetic of a decoder.

A product of a matrix of P parameters with one token takes 2 P operations, its backward pass twice
that; causal attention over T tokens takes 2 T^2 H D in each layer for scores and values together.
"""

from __future__ import annotations

from trace_pl.commands.plan.shapes import ModelShape


def forward_flops(shape: ModelShape, tokens: float, num_predicted: float, length: float) -> float:
    """Return the operations of a forward pass.

    Args:
        shape: Sizes of the model.
        tokens: Tokens read.
        num_predicted: Tokens that the vocabulary head is applied to.
        length: Tokens of one causal row; each token looks at half of it on average.
    """
    attention = 2 * length * shape.heads * shape.head_dim * shape.layers
    return tokens * (2 * shape.per_token + attention) + num_predicted * 2 * shape.head


def weights_read(shape: ModelShape, sequences: float) -> float:
    """Return the parameters that one decoding step of some sequences touches."""
    fixed = shape.base - shape.counts.experts - shape.counts.embedding
    fixed += shape.head if shape.counts.head == 0 else 0
    if not shape.experts:
        return fixed
    missed: float = (1 - shape.top_k / shape.experts) ** sequences
    return fixed + shape.counts.experts * (1 - missed)
