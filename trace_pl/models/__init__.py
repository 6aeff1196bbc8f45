"""Models: loading them, reading packed rows, adapters, experts and their weights."""

from trace_pl.models.adapters import LoRA
from trace_pl.models.experts import Experts
from trace_pl.models.loading import load_model, load_reference, load_tokenizer
from trace_pl.models.logprobs import sampled_logprobs
from trace_pl.models.names import BUILT_IN_BASE, resolve_model
from trace_pl.models.weights import policy_tensors

__all__ = [
    "BUILT_IN_BASE",
    "Experts",
    "LoRA",
    "load_model",
    "load_reference",
    "load_tokenizer",
    "policy_tensors",
    "resolve_model",
    "sampled_logprobs",
]
