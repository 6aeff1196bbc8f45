"""The LightningModule: a policy that takes steps on the loss. It knows nothing of credit."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import (
    LRSchedulerConfigType,
    OptimizerLRScheduler,
    OptimizerLRSchedulerConfig,
)
from torch import Tensor
from torch.optim import Optimizer

from trace_pl.distributed.norm import total_norm
from trace_pl.errors import ConfigError, one_line
from trace_pl.losses import LossInputs, PolicyLoss, TokenClip
from trace_pl.models.adapters import LoRA
from trace_pl.models.experts import Experts, RouterWatch, routers
from trace_pl.models.logprobs import sampled_logprobs
from trace_pl.models.names import BUILT_IN_BASE
from trace_pl.training.buffer import RolloutBuffer
from trace_pl.training.datamodule import data_module
from trace_pl.training.metrics import EpochMetrics
from trace_pl.training.minibatch import EvaluationBatch, Minibatch
from trace_pl.training.mismatch import add_mismatch
from trace_pl.training.policy_module import Dtype, PolicyModule
from trace_pl.training.rollout_metrics import rollout_statistics
from trace_pl.training.step_guard import StepGuard
from trace_pl.types import RolloutGroup


class TraceModule(PolicyModule):
    """Trains the policy on token advantages, and measures it on held-out questions.

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
        super().__init__(
            model_name=model_name,
            reference_name=reference_name,
            dtype=dtype,
            adapter=adapter,
            activation_checkpointing=activation_checkpointing,
            compile_layers=compile_layers,
        )
        self.loss = loss or TokenClip()
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.experts = experts or Experts()
        self._metrics = EpochMetrics()
        self._guard = StepGuard(max_bad_steps)
        self._routers: RouterWatch | None = None
        self._update_start = 0.0
        self._update_seconds = 0.0

    def configure_model(self) -> None:
        """Load the models, and watch the policy's routers if it has any."""
        super().configure_model()
        if self._routers is None and routers(self.policy):
            self._routers = RouterWatch(self.policy)
            self._metrics.add("experts", self._routers.load)

    def reads_reference(self) -> bool:
        """Return whether credit or the loss asks the frozen reference."""
        return self.loss.needs_reference or super().reads_reference()

    def transfer_batch_to_device(
        self, batch: Minibatch | EvaluationBatch, device: torch.device, dataloader_idx: int
    ) -> Minibatch | EvaluationBatch:
        """Move a minibatch; evaluation batches are frozen records that stay where they are."""
        return batch.to(device) if isinstance(batch, Minibatch) else batch

    # --- an epoch of updates ----------------------------------------------------------------

    def on_train_epoch_start(self) -> None:
        """Fix the old log-probs before the first step, if there is more than one."""
        self._update_start = time.perf_counter()
        buffer = data_module(self.trainer).buffer
        if not buffer.plan.takes_one_step:
            buffer.keep_old_logprobs(self.current_logprobs(buffer))

    @torch.no_grad()
    def current_logprobs(self, buffer: RolloutBuffer) -> dict[str, Tensor]:
        """Return the padded log-probs of this rank's rows under the current policy, in nats."""
        found: dict[str, Tensor] = {}
        with self.reading_policy() as policy:
            for batch in buffer.forward_batches():
                batch = batch.to(self.device)
                logprobs = sampled_logprobs(policy, batch.token_ids_BT, batch.mask_BT).cpu()
                # The row of an empty batch belongs to no rollout.
                found.update(zip(batch.rollout_ids, logprobs, strict=False))
        return found

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        """Return the loss of one micro-batch, scaled so that the accumulated step is exact."""
        if self._routers is not None:
            self._routers.begin(self.experts.choices(batch.experts_BTNK, batch.mask_BT))
        logprobs = sampled_logprobs(self.policy, batch.token_ids_BT, batch.mask_BT)
        inputs = self._loss_inputs(batch, logprobs)
        outputs = self.loss(inputs)
        loss = outputs.loss
        shares = {
            **outputs.metrics,
            "policy_loss": loss.detach(),
            "surprisal": -logprobs.detach().sum() / batch.num_loss_tokens,
        }
        if self._routers is not None:
            # The mean over micro-batches, each by its share of the step's tokens.
            balance = self._routers.finish() * batch.mask_BT.sum() / batch.num_loss_tokens
            shares["expert_balance"] = balance.detach()
            loss = loss + self.experts.balance_weight * balance
        self._guard.watch(loss, batch.rollout_ids)
        # Lightning divides by the micro-batches of a step, and the mean of an epoch by all of its
        # micro-batches; loss and metrics are shares of the whole step already, so undo that.
        scale = float(self.trainer.accumulate_grad_batches)
        self._metrics.average({f"loss/{name}": share * scale for name, share in shares.items()})
        add_mismatch(
            self._metrics, inputs.old_logprobs_BT, inputs.sampler_logprobs_BT, inputs.mask_BT
        )
        return loss * scale

    def _loss_inputs(self, batch: Minibatch, logprobs_BT: Tensor) -> LossInputs:
        old_logprobs_BT = batch.old_logprobs_BT
        if old_logprobs_BT is None:  # the policy is still what it was
            old_logprobs_BT = logprobs_BT.detach()
        return LossInputs(
            logprobs_BT=logprobs_BT,
            old_logprobs_BT=old_logprobs_BT,
            sampler_logprobs_BT=batch.sampler_logprobs_BT,
            reference_logprobs_BT=self._reference_logprobs(batch),
            advantages_BT=batch.advantages_BT,
            mask_BT=batch.mask_BT,
            num_loss_tokens=batch.num_loss_tokens,
            num_rollouts=batch.num_rollouts,
            is_on_policy=batch.is_on_policy,
            token_limit=batch.token_limit,
        )

    @torch.no_grad()
    def _reference_logprobs(self, batch: Minibatch) -> Tensor | None:
        if not self.loss.needs_reference:
            return None
        with self.reading_reference() as reference:
            return sampled_logprobs(reference, batch.token_ids_BT, batch.mask_BT)

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

    # --- the optimizer ----------------------------------------------------------------------

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

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Skip a step whose gradient is not finite; stop when that happens again and again."""
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        self._gradient_norm = norm = total_norm(gradients)
        self._metrics.average({"loss/gradient_norm": norm})
        where = self._guard.check(
            norm, self.policy.parameters(), self.global_step, self.trainer.strategy
        )
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
        metrics.average({f"{stage}/{name}": v for name, v in rollout_statistics(rollouts).items()})
        metrics.log(self)
