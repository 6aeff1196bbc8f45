"""The policy and the frozen reference: how they are loaded, read and kept in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, Literal

import lightning
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from trace_pl.distributed.strategy import ShardedStrategy
from trace_pl.errors import CreditError
from trace_pl.models.adapters import LoRA, adapter_off
from trace_pl.models.checkpoint import require_same
from trace_pl.models.loading import check_reference, has_own_reference, load_model, load_reference
from trace_pl.models.names import BUILT_IN_BASE
from trace_pl.models.weights import pushable_tensors

Dtype = Literal["float32", "bfloat16"]


class PolicyModule(lightning.LightningModule):
    """Holds the policy that learns and the frozen reference that is asked.

    It knows nothing of losses or of credit; see :class:`trace_pl.training.module.TraceModule`,
    which trains the policy, for the arguments.
    """

    def __init__(
        self,
        model_name: str = BUILT_IN_BASE,
        reference_name: str | None = None,
        dtype: Dtype = "float32",
        adapter: LoRA | None = None,
        activation_checkpointing: bool = False,
        compile_layers: bool = False,
    ) -> None:
        """Store settings; weights load in :meth:`configure_model`."""
        super().__init__()
        self.model_name = model_name
        self.reference_name = reference_name or model_name
        check_reference(self.reference_name)
        self.dtype_name = dtype
        self.adapter = adapter
        self.strict_loading = adapter is None  # the checkpoint of an adapter holds nothing else
        self.activation_checkpointing = activation_checkpointing
        self.compile_layers = compile_layers
        self.credit_reads_reference = True
        """Set by whoever assigns credit, before the models are loaded."""
        self.restarts_optimizer = False
        """Whether a loaded checkpoint's optimizer is left behind for a new one."""
        self.may_change_reference = False
        """Whether training may go on with another reference than that of the checkpoint."""
        # Lightning restores its own count of steps for training alone.
        self._loaded_step: int | None = None
        # A tuple hides the reference from the module tree: a frozen copy belongs in neither the
        # optimizer nor a checkpoint. The price is that nobody else moves it to the device.
        self._reference: tuple[PreTrainedModel, ...] = ()

    # --- loading ----------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Load the policy, and the reference where it is read; nothing is loaded twice."""
        if not hasattr(self, "policy"):
            self.policy = self._load_policy()
            if self.activation_checkpointing:
                self.policy.gradient_checkpointing_enable({"use_reentrant": False})
            if self.compile_layers:
                self.policy.get_decoder().compile(dynamic=True)
        if self.needs_own_reference() and not self._reference:
            self._reference = (self._load_reference(),)

    def reads_reference(self) -> bool:
        """Return whether a fit asks the frozen reference anything."""
        return self.credit_reads_reference

    def needs_own_reference(self) -> bool:
        """Return whether the frozen reference is read, by a model of its own; only fits read it."""
        is_read = self.reads_reference() and self._is_fit()
        has_adapter = self.adapter is not None
        return has_own_reference(is_read, has_adapter, self.reference_name, self.model_name)

    def _load_policy(self) -> PreTrainedModel:
        strategy = self._strategy()
        if isinstance(strategy, ShardedStrategy):
            dtype = getattr(torch, self.dtype_name)
            return strategy.load_policy(self.model_name, dtype, self.adapter)
        policy = load_model(self.model_name, self.dtype_name)
        policy.train()
        if self.adapter is not None:
            self.adapter.attach(policy)
        return policy

    def _load_reference(self) -> PreTrainedModel:
        strategy = self._strategy()
        if isinstance(strategy, ShardedStrategy):
            return strategy.load_reference(self.reference_name)
        return load_reference(self.reference_name, self.model_name, self.dtype_name)

    def _strategy(self) -> Strategy | None:
        return None if self._trainer is None else self._trainer.strategy

    def _is_fit(self) -> bool:
        """Return whether the trainer fits; without one, as if it did."""
        return self._trainer is None or self._trainer.state.fn == TrainerFn.FITTING

    # --- reading ----------------------------------------------------------------------------

    @contextmanager
    def reading_policy(self) -> Iterator[PreTrainedModel]:
        """Yield the policy to be read, not trained, in the precision of a step."""
        self.policy.eval()
        try:
            with self._precision():
                yield self.policy
        finally:
            self.policy.train()

    @contextmanager
    def reading_reference(self) -> Iterator[PreTrainedModel]:
        """Yield the frozen reference, on the module's device and in the precision of a step.

        With an adapter it is the policy itself, which must not be trained meanwhile.

        Raises:
            CreditError: if it was not loaded, because nothing had said that it reads it.
        """
        if not self._reference and self.adapter and self.reference_name == self.model_name:
            with self.reading_policy() as policy, adapter_off(policy) as reference:
                yield reference
            return
        if not self._reference:
            raise CreditError(
                "Expected a frozen reference to read, got none: only a fit whose prober has the "
                "`reader` 'reference', or whose loss needs it, loads one. Say so in what asks."
            )
        reference = self._reference[0]
        if not isinstance(reference, FSDPModule) and reference.device != self.device:
            torch.nn.Module.to(reference, self.device)
        with self._precision():
            yield reference

    def _precision(self) -> AbstractContextManager[None]:
        """Return the context of mixed precision, which Lightning opens for steps alone."""
        plugin = None if self._trainer is None else self._trainer.precision_plugin
        # That of true half precision would also make new tensors of it, which no number here needs.
        return plugin.forward_context() if isinstance(plugin, MixedPrecision) else nullcontext()

    @property
    def policy_version(self) -> int:
        """Optimizer steps the policy has taken; stamped on every rollout."""
        return int(self.global_step) if self._loaded_step is None else self._loaded_step

    def policy_tensors(self, dtype: torch.dtype | None = None) -> Iterable[tuple[str, Tensor]]:
        """Return the policy's weights under their checkpoint names, for a weight push.

        Args:
            dtype: number format in which sharded ones are gathered; None keeps theirs.
        """
        return pushable_tensors(self.policy, lambda: self.policy_version, dtype)

    # --- checkpoints ------------------------------------------------------------------------

    @property
    def weights_identity(self) -> dict[str, Any]:
        """What a checkpoint must be of for its weights to fit."""
        return {"model_name": self.model_name, "adapter": self.adapter and asdict(self.adapter)}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record what the policy and its credit came from; leave frozen weights out."""
        checkpoint |= {**self.weights_identity, "reference_name": self.reference_name}
        metrics = self.trainer.callback_metrics
        checkpoint["metrics"] = {name: float(value) for name, value in metrics.items()}
        if self.adapter is not None:
            trained = {name for name, p in self.named_parameters() if p.requires_grad}
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {k: t for k, t in weights.items() if k in trained}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse weights of another model, or further training with another reference.

        Raises:
            ConfigError: if one of the checkpoint's is not the configured one.
        """
        require_same(checkpoint, self.weights_identity)
        self._loaded_step = int(checkpoint["global_step"])
        if not self._is_fit():
            return
        if not self.may_change_reference:
            require_same(checkpoint, {"reference_name": self.reference_name})
        if self.restarts_optimizer:
            checkpoint |= {"optimizer_states": [], "lr_schedulers": []}

    def on_train_start(self) -> None:
        """Count steps with the Trainer from here on."""
        self._loaded_step = None
