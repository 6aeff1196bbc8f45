"""How values at boundaries become the credit of turns."""

from __future__ import annotations

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
        """Return :func:`trace_pl.credit.td.k_step_backup` of the rollout's values."""
        credit = k_step_backup(values.values, self.num_steps, self.discount)
        return TurnCredit(values.rollout_id, credit, self.num_steps, self.discount)
