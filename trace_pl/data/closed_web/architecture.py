"""The tiny Qwen3 and how it is initialised, so that it learns to copy within minutes."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

HIDDEN_SIZE = 192
HEAD_SIZE = 64
ROPE_THETA = 10_000.0
# Gain of the norms on the dimensions that the started head uses.
_SHARPNESS = 1.6


def build_model(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Qwen3ForCausalLM:
    """Return a freshly initialised Qwen3 of two layers and about one million parameters."""
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=HIDDEN_SIZE,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=3,
            head_dim=HEAD_SIZE,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            tie_word_embeddings=True,
            # The usual 0.02 is far too small for a model this narrow.
            initializer_range=HIDDEN_SIZE**-0.5,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    start_previous_token_head(model)
    return model


@torch.no_grad()
def start_previous_token_head(model: Qwen3ForCausalLM) -> None:
    """Let the first head of the first layer start out looking at the previous token.

    Copying by induction ("what followed this token before?") needs such a head. Qwen3 has no
    attention biases, so a purely positional pattern has to grow out of a direction that all
    embeddings share, and in a model this small that takes longer than all the training here. So
    every embedding gets a shared direction u, and the head's query and key read only u:

        k = (1, .., 1, 0, ..)       q = R(-1) k

    on the fastest rotary frequencies, R being the rotation by one position. Their product is
    largest exactly one position back; the norms' gains make it sharp. Everything stays trainable.
    """
    embeddings = model.model.embed_tokens.weight
    attention = model.model.layers[0].self_attn
    shared = torch.randn(HIDDEN_SIZE)
    shared /= shared.norm()
    # As long as a token's own part of its embedding.
    embeddings += shared
    half, num_fast = HEAD_SIZE // 2, 4
    frequencies = ROPE_THETA ** (-torch.arange(num_fast) / half)
    key, query = torch.zeros(HEAD_SIZE), torch.zeros(HEAD_SIZE)
    key[:num_fast] = 1.0
    query[:num_fast] = frequencies.cos()
    query[half : half + num_fast] = -frequencies.sin()
    attention.q_proj.weight[:HEAD_SIZE] = torch.outer(query, shared)
    attention.k_proj.weight[:HEAD_SIZE] = torch.outer(key, shared)
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight[:num_fast] = _SHARPNESS
        norm.weight[half : half + num_fast] = _SHARPNESS
