"""What one token takes in a decoder, counted while the model's own class runs without numbers.

Under ``FakeTensorMode`` tensors have shapes and types and no memory: a model of one layer and one
of two are built, run and differentiated in a fraction of a second, whatever their size. All that
they keep grows with the tokens, so one length is enough, and each further layer keeps what the
second does. Weights, their casts and their gradients are not counted here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from trace_pl.commands.plan.live_bytes import FakeTensorMode, LiveBytes
from trace_pl.commands.plan.shapes import Blueprint
from trace_pl.errors import ConfigError, one_line
from trace_pl.models.packed_attention import PackedRow

_TOKENS = 1024
"""Length of the row that is read."""
_DTYPES = {2: torch.bfloat16, 4: torch.float32}


class UnknownMemory(ConfigError):
    """A model's class does not run without numbers, so its memory cannot be counted."""


@dataclass(frozen=True)
class Held:
    """Bytes for each token in the decoder of a model of some layers."""

    saved: float
    """Kept from forward to backward."""
    peak: float
    """Alive at the largest moment of the backward pass."""


@dataclass(frozen=True)
class TokenBytes:
    """Bytes for each token in a training forward and backward of the decoder."""

    one_layer: Held
    two_layers: Held

    def of(self, layers: int) -> Held:
        """Return what a model of that many layers holds."""
        if layers == 1:
            return self.one_layer
        further = (layers - 2) * (self.two_layers.saved - self.one_layer.saved)
        return Held(self.two_layers.saved + further, self.two_layers.peak + further)


@cache
def training_bytes(
    blueprint: Blueprint, num_bytes: int, has_checkpointing: bool, is_autocast: bool
) -> TokenBytes:
    """Return what training holds for each token.

    Args:
        blueprint: The model.
        num_bytes: Bytes of one number of the computation.
        has_checkpointing: Whether layers keep only their input.
        is_autocast: Whether parameters are float32 and cast to ``num_bytes`` on use.

    Raises:
        UnknownMemory: if the model does not run without numbers.
    """
    count = partial(_count_training, blueprint, num_bytes, has_checkpointing, is_autocast)
    return TokenBytes(count(1), count(2))


@cache
def forward_bytes(blueprint: Blueprint, num_bytes: int) -> float:
    """Return the bytes alive for each token in a forward pass without gradients.

    Args:
        blueprint: The model.
        num_bytes: Bytes of one number of the computation.

    Raises:
        UnknownMemory: if the model does not run without numbers.
    """
    with _without_numbers(blueprint), torch.no_grad():
        model = _build(blueprint, 2, num_bytes).eval()
        live = LiveBytes(model.parameters())
        with live:
            _read(model)
    return live.peak / _TOKENS


def _count_training(
    blueprint: Blueprint, num_bytes: int, has_checkpointing: bool, is_autocast: bool, layers: int
) -> Held:
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if live.has_made(tensor):
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with _without_numbers(blueprint):
        model = _build(blueprint, layers, 4 if is_autocast else num_bytes).train()
        if has_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        live = LiveBytes(model.parameters())
        with live, torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                embedded, hidden = _read(model)
                # The head reads some tokens only; of their gradient one of all tokens is made.
                picked = hidden[0, torch.zeros(1, dtype=torch.long)].sum()
            del hidden
            # Gradients run through all layers, but none of a whole matrix is made.
            trained = (p for p in model.parameters() if p.requires_grad)
            first = embedded if embedded.requires_grad else next(trained)
            torch.autograd.grad(picked, first)
    return Held(sum(kept.values()) / _TOKENS, live.peak / _TOKENS)


def _build(blueprint: Blueprint, layers: int, num_bytes: int) -> PreTrainedModel:
    """Return a model whose tensors say that they lie in main memory, where kernels are fused."""
    with torch.device("meta"):  # adapters are attached by moves that tensors of a mode refuse
        model = blueprint.build(layers, _DTYPES[num_bytes])
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            here = torch.empty_like(weight, device="cpu")
            setattr(module, name, nn.Parameter(here, weight.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
    return model


def _read(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return the embeddings and the last hidden states of one row."""
    embedded: Tensor = model.get_input_embeddings()(torch.zeros(1, _TOKENS, dtype=torch.long))
    hidden: Tensor = model.get_decoder()(
        inputs_embeds=embedded,
        position_ids=torch.arange(_TOKENS)[None],
        packed_rows=[PackedRow(_TOKENS)],
        use_cache=False,
    ).last_hidden_state
    return embedded, hidden


@contextmanager
def _without_numbers(blueprint: Blueprint) -> Iterator[None]:
    try:
        with FakeTensorMode():
            yield
    except RuntimeError as error:
        reason = one_line(error).rstrip(".")
        raise UnknownMemory(
            f"Expected a model whose memory can be counted, got '{blueprint.config.model_type}', "
            f"which does not run on tensors without numbers ({reason}). Plan another one."
        ) from error
