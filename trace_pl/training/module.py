"""The LightningModule: policy, frozen reference, loss, optimizer. It knows nothing of credit."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, Literal

import lightning
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import (
    LRSchedulerConfigType,
    OptimizerLRScheduler,
    OptimizerLRSchedulerConfig,
)
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from transformers import PreTrainedModel

from trace_pl.distributed.norm import total_norm
from trace_pl.distributed.strategy import ShardedStrategy
from trace_pl.errors import ConfigError, CreditError, one_line
from trace_pl.losses import LossInputs, PolicyLoss, TokenClip
from trace_pl.models.adapters import LoRA, adapter_off
from trace_pl.models.checkpoint import require_same
from trace_pl.models.experts import Experts, RouterWatch, routers
from trace_pl.models.loading import (
    BUILT_IN_BASE,
    check_reference,
    has_own_reference,
    load_model,
    load_reference,
)
from trace_pl.models.logprobs import sampled_logprobs
from trace_pl.models.weights import pushable_tensors
from trace_pl.training.batch import EvaluationBatch, Minibatch, RolloutBuffer
from trace_pl.training.metrics import EpochMetrics
from trace_pl.training.mismatch import add_mismatch
from trace_pl.training.rollout_metrics import rollout_items
from trace_pl.training.step_guard import StepGuard
from trace_pl.types import RolloutGroup

Dtype = Literal["float32", "bfloat16"]


class TraceModule(lightning.LightningModule):
    """Holds the policy that learns and the frozen reference that is asked.

    Args:
        model_name: Folder, hub id or ``closed-web-base``; the policy starts here.
        reference_name: The frozen reference, a model or the ``.ckpt`` file of an earlier run of the
            same model; None means the policy's own initialisation.
        loss: Policy objective; None means per-token clipping (GRPO).
        optimizer: Given the policy's parameters, makes the optimizer.
        scheduler: Given the optimizer, makes a scheduler that is stepped once per optimizer step.
        dtype: Parameter type of policy and reference.
        adapter: Trains a low-rank difference instead of all weights; the reference then is the
            policy with the adapter off and takes no memory of its own.
        activation_checkpointing: Computes each layer's activations again in the backward pass
            instead of keeping them.
        compile_layers: Compiles everything between the attentions with ``torch.compile``.
        experts: What to do about the routers of a mixture of experts; None only logs their load.
        max_bad_steps: Optimizer steps in a row with a non-finite loss or gradient before the run
            stops; each of them is skipped.
    """

    def __init__(
        self,
        model_name: str = BUILT_IN_BASE,
        reference_name: str | None = None,
        loss: PolicyLoss | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        scheduler: LRSchedulerCallable | None = None,
        dtype: Dtype = "float32",
        adapter: LoRA | None = None,
        activation_checkpointing: bool = False,
        compile_layers: bool = False,
        experts: Experts | None = None,
        max_bad_steps: int = 3,
    ) -> None:
        """Store settings; weights load in :meth:`configure_model`."""
        super().__init__()
        self.model_name = model_name
        self.reference_name = reference_name or model_name
        check_reference(self.reference_name)
        self.loss = loss or TokenClip()
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.dtype_name = dtype
        self.adapter = adapter
        self.strict_loading = adapter is None  # the checkpoint of an adapter holds nothing else
        self.activation_checkpointing = activation_checkpointing
        self.compile_layers = compile_layers
        self.experts = experts or Experts()
        self.restarts_optimizer = False  # set for a run that goes on with another one
        self.may_change_reference = False
        self._metrics = EpochMetrics()
        self._guard = StepGuard(max_bad_steps)
        # Lightning restores its own count of steps for training alone.
        self._loaded_step: int | None = None
        self._update_start = 0.0
        self._update_seconds = 0.0
        # A tuple hides the reference from the module tree: a frozen copy belongs in neither the
        # optimizer nor a checkpoint. The price is that nobody else moves it to the device.
        self._reference: tuple[PreTrainedModel, ...] = ()
        self.credit_reads_reference = True
        """Set by whoever assigns credit, before the models are loaded."""

    def configure_model(self) -> None:
        """Load the policy, and the reference where it is read; nothing is loaded twice."""
        if not hasattr(self, "policy"):
            self._configure_policy()
        if self.needs_own_reference() and not self._reference:
            self._reference = (self._load_reference(),)

    def needs_own_reference(self) -> bool:
        """Return whether the frozen reference is read, by a model of its own; only fits read it."""
        is_read = self.loss.needs_reference or self.credit_reads_reference
        if self._trainer is not None and self._trainer.state.fn != TrainerFn.FITTING:
            is_read = False
        has_adapter = self.adapter is not None
        return has_own_reference(is_read, has_adapter, self.reference_name, self.model_name)

    def _configure_policy(self) -> None:
        policy = self._load_policy()
        if self.activation_checkpointing:
            policy.gradient_checkpointing_enable({"use_reentrant": False})
        if self.compile_layers:
            policy.get_decoder().compile(dynamic=True)
        self.policy = policy
        self._routers = RouterWatch(policy) if routers(policy) else None
        if self._routers is not None:
            self._metrics.add("experts", self._routers.load)

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

    @contextmanager
    def reading_policy(self) -> Iterator[PreTrainedModel]:
        """Yield the policy to be read, not trained, in the precision of a step."""
        self.policy.eval()
        try:
            with self._precision():
                yield self.policy
        finally:
            self.policy.train()

    def _precision(self) -> AbstractContextManager[None]:
        """Return the context of mixed precision, which Lightning opens for steps alone."""
        plugin = None if self._trainer is None else self._trainer.precision_plugin
        # That of true half precision would also make new tensors of it, which no number here needs.
        return plugin.forward_context() if isinstance(plugin, MixedPrecision) else nullcontext()

    @property
    def policy_version(self) -> int:
        """Optimizer steps the policy has taken; stamped on every rollout."""
        return int(self.global_step) if self._loaded_step is None else self._loaded_step

    def policy_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Return the policy's weights under their checkpoint names, for a weight push."""
        return pushable_tensors(self.policy, lambda: self.policy_version)

    def transfer_batch_to_device(
        self, batch: Minibatch | EvaluationBatch, device: torch.device, dataloader_idx: int
    ) -> Minibatch | EvaluationBatch:
        """Move a minibatch; evaluation batches are frozen records that stay where they are."""
        return batch.to(device) if isinstance(batch, Minibatch) else batch

    # --- training ---------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Count steps with the Trainer from here on."""
        self._loaded_step = None

    def on_train_epoch_start(self) -> None:
        """Fix the old log-probs before the first step, if there is more than one."""
        self._update_start = time.perf_counter()
        buffer = self.trainer.datamodule.buffer  # type: ignore[attr-defined]
        if not buffer.plan.takes_one_step:
            buffer.old_logprobs = self.current_logprobs(buffer)

    def on_train_batch_end(self, outputs: object, batch: Minibatch, batch_idx: int) -> None:
        """Log the updates after the last of them: a validation that follows is no part of them.

        Callbacks, which come before the module, then find the values at the end of the epoch.
        """
        self._update_seconds = time.perf_counter() - self._update_start
        if self.trainer.is_last_batch:
            self._log_updates()

    def on_train_epoch_end(self) -> None:
        """Log the updates of an epoch that was cut short."""
        if self._update_seconds:
            self._log_updates()

    def _log_updates(self) -> None:
        self._metrics.average({"time/update_s": torch.tensor(self._update_seconds)})
        self._metrics.log(self)
        self._update_seconds = 0.0

    @torch.no_grad()
    def current_logprobs(self, buffer: RolloutBuffer) -> dict[str, Tensor]:
        """Return the (T,) log-probs of every rollout's tokens under the current policy."""
        found: dict[str, Tensor] = {}
        with self.reading_policy() as policy:
            for batch in buffer.forward_batches():
                batch = batch.to(self.device)
                logprobs = sampled_logprobs(policy, batch.token_ids_BT, batch.mask_BT).cpu()
                # The row of an empty batch belongs to no rollout.
                found.update(zip(batch.rollout_ids, logprobs, strict=False))
        return {r.id: found[r.id][: len(r.token_ids)] for r in buffer.rollouts}

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        """Return the loss of one micro-batch, scaled so that the accumulated step is exact."""
        if self._routers is not None:
            self._routers.begin(self.experts.choices(batch.experts_BTNK, batch.mask_BT))
        logprobs = sampled_logprobs(self.policy, batch.token_ids_BT, batch.mask_BT)
        old = logprobs.detach() if batch.old_logprobs_BT is None else batch.old_logprobs_BT
        outputs = self.loss(
            LossInputs(
                logprobs,
                old,
                batch.sampler_logprobs_BT,
                batch.advantages_BT,
                batch.mask_BT,
                batch.num_loss_tokens,
                batch.num_rollouts,
                self._reference_logprobs(batch) if self.loss.needs_reference else None,
                batch.is_on_policy,
                batch.token_limit,
            )
        )
        add_mismatch(self._metrics, old, batch.sampler_logprobs_BT, batch.mask_BT)
        scale = float(self.trainer.accumulate_grad_batches)
        metrics = {
            **outputs.metrics,
            "policy_loss": outputs.loss.detach(),
            "surprisal": -logprobs.detach().sum() / batch.num_loss_tokens,
        }
        loss = outputs.loss
        if self._routers is not None:
            # The mean over micro-batches, each by its share of the step's tokens.
            balance = self._routers.finish() * batch.mask_BT.sum() / batch.num_loss_tokens
            metrics["expert_balance"] = balance.detach()
            loss = loss + self.experts.balance_weight * balance
        # Each metric is this micro-batch's share of the step; the epoch mean times the number of
        # micro-batches is the mean over steps.
        self._metrics.average({f"loss/{name}": value * scale for name, value in metrics.items()})
        self._guard.watch(loss, batch.rollout_ids)
        # Lightning divides by the micro-batches of a step; the loss is already normalised by all
        # tokens of the step, so undo that.
        return loss * scale

    @torch.no_grad()
    def _reference_logprobs(self, batch: Minibatch) -> Tensor:
        with self.reading_reference() as reference:
            return sampled_logprobs(reference, batch.token_ids_BT, batch.mask_BT)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Skip a step whose gradient is not finite; stop when that happens again and again."""
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        self._gradient_norm = norm = total_norm(gradients)
        self._metrics.average({"loss/gradient_norm": norm})
        self._guard.share(self.trainer.strategy)
        where = self._guard.check(norm, self.policy.parameters(), self.global_step)
        if where:
            self.print(f"Step {self.global_step} is skipped: {where} is not finite.")

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the norm that was measured for the log; torch would measure it once more."""
        if gradient_clip_val and gradient_clip_algorithm in (None, "norm"):
            # One by one: torch multiplies no list of tensors that lie on different meshes.
            torch.nn.utils.clip_grads_with_norm_(
                self.policy.parameters(), gradient_clip_val, self._gradient_norm, foreach=False
            )
        else:
            super().configure_gradient_clipping(
                optimizer, gradient_clip_val, gradient_clip_algorithm
            )

    # --- evaluation -------------------------------------------------------------------------

    def validation_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        """Log success and behaviour on held-out questions."""
        self._evaluate("validation", batch.groups)

    def test_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        """Log success and behaviour on test questions."""
        self._evaluate("test", batch.groups)

    def predict_step(self, batch: EvaluationBatch, batch_idx: int) -> EvaluationBatch:
        """Return the rollouts themselves."""
        return batch

    def _evaluate(self, stage: str, groups: Sequence[RolloutGroup]) -> None:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        metrics = EpochMetrics()  # a loader gives all of this rank in one batch
        metrics.average({f"{stage}/{name}": v for name, v in rollout_items(rollouts).items()})
        metrics.log(self)

    # --- optimizer and checkpoint -----------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer over what is trained of the policy, and its scheduler.

        Raises:
            ConfigError: for settings that the optimizer refuses.
        """
        try:
            optimizer = self.make_optimizer(p for p in self.policy.parameters() if p.requires_grad)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"Expected settings that the optimizer takes, got: {one_line(error)}. Change "
                "`model.optimizer.init_args`."
            ) from error
        if self.make_scheduler is None:
            return optimizer
        scheduler = LRSchedulerConfigType(scheduler=self.make_scheduler(optimizer), interval="step")
        return OptimizerLRSchedulerConfig(optimizer=optimizer, lr_scheduler=scheduler)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record what the policy began as and whence its credit came; leave frozen weights out."""
        checkpoint |= {**self.weights_identity, "reference_name": self.reference_name}
        metrics = self.trainer.callback_metrics
        checkpoint["metrics"] = {name: float(value) for name, value in metrics.items()}
        if self.adapter is not None:
            trained = self._trained_names()
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {k: t for k, t in weights.items() if k in trained}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse weights of another model, and to go on training with another reference.

        Raises:
            ConfigError: if one of the checkpoint's is not the configured one.
        """
        require_same(checkpoint, self.weights_identity)
        self._loaded_step = int(checkpoint["global_step"])
        if self._trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return
        if not self.may_change_reference:
            require_same(checkpoint, {"reference_name": self.reference_name})
        if self.restarts_optimizer:
            checkpoint |= {"optimizer_states": [], "lr_schedulers": []}

    @property
    def weights_identity(self) -> dict[str, Any]:
        """What a checkpoint must be of for its weights to fit."""
        return {"model_name": self.model_name, "adapter": self.adapter and asdict(self.adapter)}

    def _trained_names(self) -> set[str]:
        return {name for name, p in self.named_parameters() if p.requires_grad}
