"""Keeps an update that is not a number from the weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from trace_pl.errors import NumericalError


class StepGuard:
    """Drops the gradient of a step that is not finite; stops when that happens again and again.

    Args:
        max_bad_steps: Bad steps in a row at which the run stops, at least 1.
    """

    def __init__(self, max_bad_steps: int) -> None:
        self.max_bad_steps = max_bad_steps
        self._bad_steps = 0
        self._watched: list[tuple[Tensor, Sequence[str]]] = []

    def watch(self, loss: Tensor, rollout_ids: Sequence[str]) -> None:
        """Remember the loss of a micro-batch and its rollouts."""
        # Read only once per step: reading waits for the accelerator.
        self._watched.append((loss.detach().isfinite(), rollout_ids))

    def check(
        self, norm: Tensor, parameters: Iterable[nn.Parameter], step: int, strategy: Strategy
    ) -> str:
        """Judge a step before it is taken; a step that is bad for one rank is dropped by all.

        Args:
            norm: Norm of the whole gradient, equal on all ranks.
            parameters: Parameters whose gradients are dropped if the step is bad.
            step: Number of the step, for the message.
            strategy: Exchanges what the ranks have seen.

        Returns:
            What is not finite; empty for a good step.

        Raises:
            NumericalError: at the ``max_bad_steps``-th bad step in a row.
        """
        is_finite = torch.stack([norm.isfinite(), *(finite for finite, _ in self._watched)])
        good_norm, *good_losses = is_finite.tolist()
        watched, self._watched = self._watched, []
        bad_batches = [ids for (_, ids), good in zip(watched, good_losses, strict=True) if not good]
        is_bad = strategy.reduce_boolean_decision(bool(bad_batches), all=False)
        if good_norm and not is_bad:
            self._bad_steps = 0
            return ""
        for parameter in parameters:
            parameter.grad = None
        self._bad_steps += 1
        bad_rows = [id_ for ids in bad_batches for id_ in ids]
        where = f"the loss of rollouts {', '.join(bad_rows[:4])}" if bad_rows else "the gradient"
        if self._bad_steps >= self.max_bad_steps:
            raise NumericalError(
                f"Expected finite numbers at step {step}, got non-finite ones in {where}, "
                f"{self._bad_steps} steps in a row. Lower the learning rate."
            )
        return where
