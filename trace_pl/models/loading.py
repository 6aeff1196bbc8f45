"""Loading causal language models and their tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import set_tqdm_hook

from trace_pl.errors import ConfigError, one_line
from trace_pl.models.checkpoint import read_checkpoint
from trace_pl.models.names import find_model
from trace_pl.models.packed_attention import PACKED, require_packed_attention


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    path = find_model(name)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Expected a tokenizer beside model '{name}', got: {one_line(error)}"
        ) from error
    return tokenizer


def load_end_ids(name: str) -> frozenset[int]:
    """Return the tokens that end a text by a model's generation settings, or else by its config.

    Raises:
        ConfigError: if neither can be read.
    """
    path = find_model(name)
    try:
        try:
            found = GenerationConfig.from_pretrained(path).eos_token_id
        except OSError:  # a model without generation settings
            found = AutoConfig.from_pretrained(path).get_text_config().eos_token_id
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Expected generation settings or a config of model '{name}', got: {one_line(error)}"
        ) from error
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def load_model(name: str, dtype: str = "float32") -> PreTrainedModel:
    """Load a causal language model with packed attention.

    Raises:
        ConfigError: if it cannot be loaded, or has layers that packed attention cannot serve.
    """
    path = find_model(name)
    try:
        with _bar_after(seconds=5):
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                path, dtype=getattr(torch, dtype), attn_implementation=PACKED
            )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Expected a causal language model at '{name}', got: {one_line(error)}"
        ) from error
    require_packed_attention(model)
    return model


@contextmanager
def _bar_after(seconds: float) -> Iterator[None]:
    """Show the bar of weights that are loaded only where they take longer than a moment."""

    def delayed(make: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]) -> Any:  # noqa: ANN401
        return make(*args, **{"delay": seconds, **settings})

    before = set_tqdm_hook(delayed)
    try:
        yield
    finally:
        set_tqdm_hook(before)


def model_on_meta(name: str) -> PreTrainedModel:
    """Return a model of the right shape whose parameters take no memory yet.

    The frequencies of rotary positions are no parameters and are there already.

    Raises:
        ConfigError: if its config cannot be read, or it cannot read packed rows.
    """
    path = find_model(name)
    try:
        config = AutoConfig.from_pretrained(path, attn_implementation=PACKED)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Expected a causal language model at '{name}', got: {one_line(error)}"
        ) from error
    require_packed_attention(model)
    renew_rotary(model)
    return model


def renew_rotary(model: PreTrainedModel, device: torch.device | str = "cpu") -> None:
    """Compute a model's rotary frequencies again; no file holds them."""
    decoder = model.get_decoder()
    with torch.device(device):
        decoder.rotary_emb = type(decoder.rotary_emb)(model.config)


def check_reference(name: str) -> None:
    """Raise unless a reference given as a checkpoint file is there.

    Raises:
        ConfigError: if it is not.
    """
    if name.endswith(".ckpt") and not Path(name).exists():
        raise ConfigError(
            f"Expected a checkpoint at '{name}', got none there. Set `model.reference_name` to a "
            "model or to the .ckpt file of an earlier run."
        )


def has_own_reference(
    is_read: bool, has_adapter: bool, reference_name: str | None, model_name: str
) -> bool:
    """Return whether a run loads a frozen model beside the policy.

    Args:
        is_read: Whether credit or the loss asks the reference.
        has_adapter: Whether the policy with its adapter off is what it was.
        reference_name: What is configured; None means the policy's initialisation.
        model_name: The policy's model.
    """
    return is_read and not (has_adapter and reference_name in (None, model_name))


def load_reference(name: str, policy_name: str, dtype: str = "float32") -> PreTrainedModel:
    """Load a frozen model from a model name, or from a checkpoint of a run with the same policy.

    Args:
        name: Folder, hub id, ``closed-web-base``, or the ``.ckpt`` of a run.
        policy_name: The policy's model, whose architecture a checkpoint has.
        dtype: Parameter type.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    is_checkpoint = name.endswith(".ckpt")
    model = load_model(policy_name if is_checkpoint else name, dtype)
    model.eval().requires_grad_(False)
    if not is_checkpoint:
        return model
    saved = read_checkpoint(Path(name))["state_dict"]
    try:
        model.load_state_dict({key.removeprefix("policy."): t for key, t in saved.items()})
    except RuntimeError as error:
        raise ConfigError(
            f"Expected a checkpoint of a run of '{policy_name}' at '{name}', got: "
            f"{one_line(error)} Set `model.reference_name` to a model or to such a file."
        ) from error
    return model
