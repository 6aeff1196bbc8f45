"""Models for the benchmarks of parity: random ones of any depth, about as sure as trained ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributions import Categorical
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from trace_pl.models.loading import load_model

VOCAB = 4096
WIDTH = 128
SIZE = 400
"""Tokens of a text."""


@torch.no_grad()
def save_random_model(
    folder: str, layers: int, has_experts: bool, seed: int, entropy: float = 1.5
) -> None:
    """Save a random model whose next token has a given entropy, in nats.

    Every layer adds about as much as there is, as at the start of a training; the layers of a
    trained model add less and carry less noise.
    """
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 3 * WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": WIDTH // 32,
        "num_key_value_heads": WIDTH // 64,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "initializer_range": WIDTH**-0.5,
    }
    model: Any
    if has_experts:  # as many as Qwen3-30B-A3B has
        sizes |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 64}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, norm_topk_prob=True)).eval()
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()
    for name, tensor in model.named_parameters():
        if "norm" in name:  # ones, which hide a wrong order
            tensor.uniform_(0.5, 1.5)
    logits = model(torch.randint(VOCAB, (1, SIZE))).logits[0]
    low, high = 0.0, 100.0
    for _ in range(30):
        scale = (low + high) / 2
        is_unsure = float(Categorical(logits=scale * logits).entropy().mean()) > entropy
        low, high = (scale, high) if is_unsure else (low, scale)
    model.lm_head.weight.mul_(high)
    model.save_pretrained(folder)


def load(folder: str, dtype: str = "float32") -> PreTrainedModel:
    """Return the model as the trainer loads it."""
    return load_model(folder, dtype).eval()


def eager(folder: str, dtype: str) -> PreTrainedModel:
    """Return the model with transformers' plain attention."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    return model.eval()


def sample(folder: str, tokens: int, seed: int = 0) -> list[int]:
    """Return tokens that a model sampled, so that it is as sure of them as of its rollouts."""
    torch.manual_seed(seed)
    model: Any = eager(folder, "float32")
    start = torch.randint(model.config.vocab_size, (1, 1))
    ids: list[int] = model.generate(
        start, do_sample=True, top_k=0, min_new_tokens=tokens, max_new_tokens=tokens
    )[0].tolist()
    return ids
