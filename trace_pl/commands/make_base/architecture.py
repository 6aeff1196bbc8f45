"""The tiny Qwen3 and how it is initialised, so that it learns to copy within minutes."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

HIDDEN_SIZE = 192
HEAD_SIZE = 64
ROPE_THETA = 10_000.0
# Gain of the query and key norms of the started heads.
_SHARPNESS = 1.5
# Scale of what a block first writes to the residual stream, where embeddings have length 1: any
# louder, and the second layer reads mostly noise.
_QUIET = 0.1


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
    start_induction(model)
    return model


@torch.no_grad()
def start_induction(model: Qwen3ForCausalLM) -> None:
    """Let the first head of each layer start out as one half of an induction circuit.

    "What followed this token before?" is most of what the closed web asks; left alone, the circuit
    for it takes longer to form than all the training here. Everything stays trainable.

    The first layer's head looks at the previous token. Qwen3 has no attention biases, so a purely
    positional pattern has to come from a direction that all embeddings share: every embedding gets
    a direction u, and the head's query and key read only u:

        k = (1, .., 1, 0, ..)       q = R(-1) k

    on the fastest rotary frequencies, R being the rotation by one position. Their product is
    largest exactly one position back.

    The second layer's head compares the token at hand (query) with what the first head wrote (key)
    on the slow frequencies, where distance hardly matters, and copies the token it finds.
    """
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(_QUIET)
        layer.mlp.down_proj.weight.mul_(_QUIET)
    basis = torch.nn.init.orthogonal_(torch.empty(HIDDEN_SIZE, HIDDEN_SIZE))
    token, previous_token, shared = basis[:HEAD_SIZE], basis[HEAD_SIZE : 2 * HEAD_SIZE], basis[-1]
    model.model.embed_tokens.weight += shared
    head = slice(0, HEAD_SIZE)
    half, num_fast = HEAD_SIZE // 2, 4

    attention = model.model.layers[0].self_attn
    frequencies = ROPE_THETA ** (-torch.arange(num_fast) / half)
    key, query = torch.zeros(HEAD_SIZE), torch.zeros(HEAD_SIZE)
    key[:num_fast] = 1.0
    query[:num_fast] = frequencies.cos()
    query[half : half + num_fast] = -frequencies.sin()
    attention.q_proj.weight[head] = torch.outer(query, shared)
    attention.k_proj.weight[head] = torch.outer(key, shared)
    attention.v_proj.weight[head] = token
    attention.o_proj.weight[:, head] = _QUIET * previous_token.T
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight[:num_fast] = _SHARPNESS
        norm.weight[half : half + num_fast] = _SHARPNESS

    attention = model.model.layers[1].self_attn
    is_slow = (torch.arange(HEAD_SIZE) % half >= half // 2).float()[:, None]
    attention.q_proj.weight[head] = is_slow * token
    attention.k_proj.weight[head] = is_slow * previous_token
    attention.v_proj.weight[head] = token
    attention.o_proj.weight[:, head] = token.T
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_(_SHARPNESS)
