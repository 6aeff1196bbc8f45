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
        max_bad_steps: Steps in a row that may be dropped, less one.
    """

    def __init__(self, max_bad_steps: int) -> None:
        self.max_bad_steps = max_bad_steps
        self._bad_steps = 0
        self._bad_rows: tuple[str, ...] = ()
        self._is_bad = False

    def watch(self, loss: Tensor, rollout_ids: Sequence[str]) -> None:
        """Remember the rollouts of a micro-batch whose loss is not finite."""
        if not torch.isfinite(loss):
            self._is_bad = True
            self._bad_rows += tuple(rollout_ids)

    def share(self, strategy: Strategy) -> None:
        """Agree with the other ranks: a step that is bad for one is dropped by all."""
        self._is_bad = strategy.reduce_boolean_decision(self._is_bad, all=False)

    def check(self, norm: Tensor, parameters: Iterable[nn.Parameter], step: int) -> str:
        """Judge a step before it is taken.

        Args:
            norm: Of the gradient.
            parameters: Whose gradients are dropped if the step is bad.
            step: Its number, for the message.

        Returns:
            What is not finite; empty for a good step.

        Raises:
            NumericalError: at the ``max_bad_steps``-th bad step in a row.
        """
        bad_rows, self._bad_rows = self._bad_rows, ()
        is_bad, self._is_bad = self._is_bad, False
        if torch.isfinite(norm) and not is_bad:
            self._bad_steps = 0
            return ""
        for parameter in parameters:
            parameter.grad = None
        self._bad_steps += 1
        where = f"the loss of rollouts {', '.join(bad_rows[:4])}" if bad_rows else "the gradient"
        if self._bad_steps >= self.max_bad_steps:
            raise NumericalError(
                f"Expected finite numbers at step {step}, got non-finite ones in {where}, "
                f"{self._bad_steps} steps in a row. Lower the learning rate."
            )
        return where
