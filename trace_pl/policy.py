"""Loading causal language models, and the one forward that training needs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from trace_pl.errors import ConfigError

BUILT_IN_BASE = "closed-web-base"
"""Name of the tiny model that ships with the package."""


def resolve_model(name: str) -> str:
    """Return a local folder or hub id for a model name, checked without touching a network.

    Raises:
        ConfigError: if a path does not exist or holds no model.
    """
    if name == BUILT_IN_BASE:
        return str(Path(__file__).parent / "data" / "closed_web" / "base")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"Expected a Hugging Face model folder at '{name}', got one without config.json."
            )
        return str(path)
    looks_like_hub_id = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if looks_like_hub_id:
        return name
    raise ConfigError(
        f"Expected a model folder, a hub id 'owner/name' or '{BUILT_IN_BASE}', got '{name}', which "
        "does not exist. Set `model_name` to one of these."
    )


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Raises:
        ConfigError: if it can not be loaded.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(resolve_model(name))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Expected a tokenizer beside model '{name}', got: {first_line(error)}"
        ) from error
    return tokenizer


def load_model(name: str, dtype: str = "float32") -> PreTrainedModel:
    """Load a causal language model with SDPA attention.

    Raises:
        ConfigError: if it can not be loaded.
    """
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            resolve_model(name), dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Expected a causal language model at '{name}', got: {first_line(error)}"
        ) from error
    return model


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def sampled_logprobs(model: nn.Module, token_ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the model's log-prob of each masked token given all tokens before it.

    The vocabulary head runs on the rows that predict a masked token only; rows are right-padded, so
    causal attention needs no padding mask.

    Args:
        model: A transformers causal language model.
        token_ids_BT: (B, T) int64, right-padded.
        mask_BT: (B, T) bool; the first column must be false.

    Returns:
        (B, T) float32 in nats, zero off the mask. It depends on the parameters even when the mask
        is empty, so an empty micro-batch still has a (zero) gradient.
    """
    hidden_BTD = model.model(input_ids=token_ids_BT, use_cache=False).last_hidden_state
    predicts = mask_BT[:, 1:]
    logits_MV = model.lm_head(hidden_BTD[:, :-1][predicts]).float()
    picked_M = -F.cross_entropy(logits_MV, token_ids_BT[:, 1:][predicts], reduction="none")
    logprobs = hidden_BTD.new_zeros(token_ids_BT.shape, dtype=torch.float32)
    logprobs = logprobs + 0.0 * hidden_BTD[:1, :1, :1].sum().float()
    return logprobs.masked_scatter(mask_BT & _not_first(mask_BT), picked_M)


def _not_first(mask_BT: Tensor) -> Tensor:
    keep = torch.ones_like(mask_BT)
    keep[:, 0] = False
    return keep
