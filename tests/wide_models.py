"""Random models whose layers have the proportions of real ones."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from trace_pl.models.packed_attention import PACKED

WIDE = {
    "vocab_size": 2000,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attn_implementation": PACKED,
}


def make_wide(**changes):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**WIDE, **changes})).train()


def make_wide_llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**WIDE)).train()


def make_wide_moe(**changes):
    torch.manual_seed(0)
    mixture = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**WIDE, **mixture, **changes})).train()
