"""Low-rank adapters: the policy is the frozen reference plus a small trained difference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from trace_pl.errors import ConfigError

_NAME = "default"  # of the adapter, where peft wants one


@dataclass(frozen=True)
class LoRA:
    """Low-rank adaptation of linear layers (Hu et al., arXiv 2106.09685), through peft.

    The adapted weight is W + (alpha / rank) B A; W stays as it was loaded.

    Args:
        rank: Inner dimension of B A, at least 1.
        alpha: Scale of the difference, above 0.
        dropout: Probability of dropping an input of the adapter while training. Above zero, the
            policy that is trained is not quite the one that sampled.
        target_modules: Names of the layers to adapt, or "all-linear" for all but the head. The
            fused experts of a mixture and its routers are no linear layers and stay frozen.

    Raises:
        ConfigError: if a number is out of range.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0.0 or not 0.0 <= self.dropout < 1.0:
            raise ConfigError(
                "Expected a LoRA rank of at least 1, alpha above 0 and dropout in [0, 1) in "
                f"model.adapter, got {self.rank}, {self.alpha} and {self.dropout}."
            )

    def attach(self, model: PreTrainedModel) -> None:
        """Add the adapter to a model and freeze everything else; outputs stay as they are at first.

        Raises:
            ConfigError: if peft is missing, or a target is not in the model.
        """
        try:
            from peft import LoraConfig
        except ImportError as error:
            raise ConfigError(
                "Expected peft for model.adapter, got none installed. Run "
                "`pip install 'trace-pl[lora]'`."
            ) from error
        try:
            model.add_adapter(
                LoraConfig(
                    r=self.rank,
                    lora_alpha=self.alpha,  # type: ignore[arg-type]  # any number works
                    lora_dropout=self.dropout,
                    target_modules=self._targets(model),
                ),
                adapter_name=_NAME,
            )
        except ValueError as error:
            raise ConfigError(
                f"Expected layers of the model as model.adapter.target_modules, got "
                f"{self.target_modules}. {error}"
            ) from error
        if any(".experts." in name and ".lora_" in name for name, _ in model.named_parameters()):
            raise ConfigError(
                "Expected layers outside the experts of a mixture as model.adapter.target_modules, "
                f"got {self.target_modules}. Fused experts cannot be adapted; name other layers."
            )

    def _targets(self, model: PreTrainedModel) -> str | list[str]:
        """Return peft's ``target_modules``; its own "all-linear" would wrap experts and routers."""
        if self.target_modules != "all-linear":
            return self.target_modules
        decoder = model.get_decoder()
        linear = [name for name, layer in decoder.named_modules() if isinstance(layer, nn.Linear)]
        return sorted({name.rpartition(".")[2] for name in linear})


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Yield a model as it was before :meth:`LoRA.attach`."""
    model.disable_adapters()
    try:
        yield model
    finally:
        model.enable_adapters()


def base_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights without the adapter, under their names without it; no tied head."""
    tied = getattr(model.config, "tie_word_embeddings", False)
    for name, tensor in model.state_dict().items():
        if ".lora_" not in name and not (tied and name == "lm_head.weight"):
            yield name.replace(".base_layer.", "."), tensor.detach()


def merged_tensors(
    model: PreTrainedModel, base: Iterable[tuple[str, Tensor]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with the adapter's difference added, under their names without it.

    One tensor at a time, so no second copy of the model is made. A model without adapters gives its
    own weights.

    Args:
        model: Holds the adapter.
        base: Weights without it; None takes those of the model.
    """
    layers = dict(model.named_modules())
    for name, tensor in base_tensors(model) if base is None else base:
        layer = layers.get(name.removesuffix(".weight"))
        if layer is not None and hasattr(layer, "get_delta_weight"):
            tensor = tensor + layer.get_delta_weight(_NAME).to(tensor.dtype)
        yield name, tensor.detach()
