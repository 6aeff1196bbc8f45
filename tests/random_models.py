"""Random models of the supported kinds, small enough for hundreds of forwards."""

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

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "attn_implementation": PACKED,
}


def make_qwen3(**changes):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **changes})).eval()


def make_llama(**changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()


def make_qwen3_moe(**changes):
    torch.manual_seed(0)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    # Grouped products do not know float64.
    sizes["experts_implementation"] = "eager"
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **sizes, **changes})).eval()


def perturb(policy, seed, part=""):
    """Move the parameters whose names hold ``part``."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in policy.named_parameters():
            if part in name:
                tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
