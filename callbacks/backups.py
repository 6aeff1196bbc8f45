"""How values at boundaries become the credit of turns."""

from __future__ import annotations

import torch

from trace_pl.credit.stages import Backup
from trace_pl.credit.td import check_backup_settings, k_step_backup
from trace_pl.types import ProbeValues, TurnCredit


class KStepTD(Backup):
    """The K-step backup of TRACE: a discounted mean of the next K gains.

    Args:
        num_steps: K, at least 1; 1 gives plain one-step differences.
        discount: gamma, in 0 .. 1. Both numbers travel with the credit to the anchor.

    Raises:
        ConfigError: if either is out of range.
    """

    def __init__(self, num_steps: int = 3, discount: float = 0.8) -> None:
        check_backup_settings(num_steps, discount)
        self.num_steps = num_steps
        self.discount = discount

    def backup(self, values: ProbeValues) -> TurnCredit:
        """Return :func:`trace_pl.credit.k_step_backup` of the rollout's values."""
        credit = k_step_backup(values.values, self.num_steps, self.discount)
        return TurnCredit(values.rollout_id, credit, self.num_steps, self.discount)


class MonteCarlo(Backup):
    """Looks ahead to the end: the discounted mean of all later gains.

    Args:
        discount: gamma, in 0 .. 1; travels with the credit to the anchor, whose outcome then
            reaches every turn.

    Raises:
        ConfigError: if the discount is out of range.
    """

    def __init__(self, discount: float = 0.8) -> None:
        check_backup_settings(1, discount)
        self.discount = discount

    def backup(self, values: ProbeValues) -> TurnCredit:
        """Return the backup with as many steps as the rollout has turns."""
        num_steps = max(1, len(values.values) - 1)
        credit = k_step_backup(values.values, num_steps, self.discount)
        return TurnCredit(values.rollout_id, credit, num_steps, self.discount)


class ShuffledKStepTD(KStepTD):
    """A control: the K-step credits of a rollout, dealt to its turns at random.

    Magnitudes, signs and sums are those of :class:`KStepTD`; only the claim "this turn earned it"
    is taken away. What trains as well with it owes nothing to turn-level credit.

    Args:
        num_steps: K, at least 1.
        discount: gamma, in 0 .. 1.

    Raises:
        ConfigError: if either is out of range.
    """

    def backup(self, values: ProbeValues) -> TurnCredit:
        """Return the K-step credits in an order drawn from torch's random state."""
        dealt = super().backup(values)
        order = torch.randperm(len(dealt.credit))
        return TurnCredit(dealt.rollout_id, dealt.credit[order], dealt.num_steps, dealt.discount)
