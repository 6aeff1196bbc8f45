"""How large a model is, from its config alone: no weights are read and none are made."""

from __future__ import annotations

import re
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from trace_pl.errors import ConfigError, one_line
from trace_pl.models.adapters import LoRA
from trace_pl.models.names import find_model, resolve_model
from trace_pl.models.packed_attention import PACKED, require_packed_attention

KNOWN_MODELS = Path(__file__).parent / "models"
"""Configs of models that are planned often, by hub id, so that a plan needs no network."""

_KINDS = (
    ("adapter", r"\.lora_"),
    ("embedding", r"embed_tokens\."),
    ("head", r"lm_head\."),
    ("experts", r"\.experts\."),
    ("router", r"\.mlp\.gate\.weight$"),
    ("norm", r"norm\."),
    ("attention", r"\.self_attn\."),
    ("mlp", r"\.mlp\."),
)


@dataclass(frozen=True)
class Counts:
    """Parameters by kind; those of a tied head are counted as the embedding's."""

    embedding: int = 0
    head: int = 0
    attention: int = 0
    mlp: int = 0
    experts: int = 0
    router: int = 0
    norm: int = 0
    adapter: int = 0


@dataclass(frozen=True, eq=False)
class Blueprint:
    """What a model is made from; one that is planned lies on no device."""

    config: PreTrainedConfig
    adapter: LoRA | None = None

    def build(self, layers: int | None = None, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Return a new model of some layers, to be made under a mode or a device."""
        config = deepcopy(self.config)
        if layers is not None:
            config.num_hidden_layers = layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:1] * layers
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=PACKED, dtype=dtype
        )
        if self.adapter is not None:
            self.adapter.attach(model)
        return model


@dataclass(frozen=True)
class ModelShape:
    """What memory and arithmetic of a decoder depend on."""

    name: str
    blueprint: Blueprint = field(compare=False, repr=False)
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int
    """Experts of a layer of a mixture; 0 for a dense model."""
    top_k: int
    """Experts that one token visits."""
    counts: Counts
    largest_layer: int
    """Parameters of the largest decoder layer."""
    outside_layers: int
    """Parameters that are in no decoder layer."""
    trained: int
    """Parameters that the optimizer changes."""

    @property
    def total(self) -> int:
        """All parameters, an adapter's included."""
        return sum(vars(self.counts).values())

    @property
    def base(self) -> int:
        """Parameters without an adapter's: those of the reference and the engine."""
        return self.total - self.counts.adapter

    @property
    def active(self) -> int:
        """Parameters of the base that one token meets."""
        return self.base - self.counts.experts + self.active_experts

    @property
    def active_experts(self) -> int:
        """Parameters of the experts that one token visits."""
        return self.counts.experts * self.top_k // self.experts if self.experts else 0

    @property
    def layer_experts(self) -> float:
        """Parameters of one layer's experts."""
        return self.counts.experts / self.layers

    @property
    def per_token(self) -> int:
        """Parameters of the layers that multiply each token: neither embedding nor head."""
        c = self.counts
        return c.attention + c.mlp + c.router + c.adapter + self.active_experts

    @property
    def cast(self) -> int:
        """Parameters of products that mixed precision casts on use: all but fused experts'."""
        return self.per_token - self.active_experts + self.head

    @property
    def head(self) -> int:
        """Parameters of the vocabulary head, tied or not."""
        return self.vocab * self.hidden


def read_config(name: str) -> PreTrainedConfig:
    """Return the config of a model folder, a known model or a hub id, in this order.

    Raises:
        ConfigError: if there is none.
    """
    known = KNOWN_MODELS / resolve_model(name)
    path = known if known.is_dir() else find_model(name)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Expected the config.json of a model at '{name}', got: {one_line(error)} Set "
            "`model.model_name` to a folder that holds one, or connect to the hub."
        ) from error
    return config


def read_shape(name: str, adapter: LoRA | None = None) -> ModelShape:
    """Return the shape of a model, with its adapter.

    Args:
        name: Folder, hub id or ``closed-web-base``.
        adapter: Low-rank adapter that is trained instead of all weights.

    Raises:
        ConfigError: if there is no config, or its model cannot read packed rows.
    """
    return _shape_alone(name) if adapter is None else _shape(name, adapter)


@cache
def _shape_alone(name: str) -> ModelShape:
    return _shape(name)  # building a large mixture takes seconds, and advice is asked for often


def _shape(name: str, adapter: LoRA | None = None) -> ModelShape:
    blueprint = Blueprint(read_config(name), adapter)
    with torch.device("meta"):
        model = blueprint.build()
    require_packed_attention(model)
    return shape_of(model, name, adapter)


def shape_of(model: PreTrainedModel, name: str = "", adapter: LoRA | None = None) -> ModelShape:
    """Return the shape of a model, its adapter included; it may lie on the meta device."""
    config = model.config
    counts: Counter[str] = Counter()
    for key, parameter in model.named_parameters():
        kind = next((kind for kind, part in _KINDS if re.search(part, key)), "mlp")
        counts[kind] += parameter.numel()
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.get_decoder().layers]
    return ModelShape(
        name=name,
        blueprint=Blueprint(config, adapter),
        hidden=config.hidden_size,
        layers=len(layers),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        vocab=config.vocab_size,
        experts=getattr(config, "num_experts", 0) or 0,
        top_k=getattr(config, "num_experts_per_tok", 0) or 0,
        counts=Counts(**counts),
        largest_layer=max(layers),
        outside_layers=sum(counts.values()) - sum(layers),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
    )
