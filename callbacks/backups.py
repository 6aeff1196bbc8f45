"""How values at boundaries become the credit of turns."""

from __future__ import annotations

from trace_pl.credit.groups import discounted_sums
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


class ReturnToGo(Backup):
    """The sum of all later gains of a turn; without a discount V_N - V_k.

    Potential-based shaping (TIPS, arXiv 2603.22293) gives each turn its gain as a reward; this is
    the return of those rewards. Unlike :class:`KStepTD` it is a sum and not a mean, so early turns
    of a rollout that found much get much: compare them with others of the group.

    Args:
        discount: gamma, in 0 .. 1.

    Raises:
        ConfigError: if the discount is out of range.
    """

    def __init__(self, discount: float = 1.0) -> None:
        check_backup_settings(1, discount)
        self.discount = discount

    def backup(self, values: ProbeValues) -> TurnCredit:
        """Return the discounted sum of the gains from each turn on."""
        credit = discounted_sums(values.values.diff(), self.discount)
        num_steps = max(1, len(credit))
        return TurnCredit(values.rollout_id, credit, num_steps, self.discount)


class PositiveGain(Backup):
    """The gain of each turn, with losses counted as nothing.

    The reward of DeltaBelief-RL (arXiv 2602.12342), where a turn that lowers the belief in the
    answer is not blamed for it.
    """

    def backup(self, values: ProbeValues) -> TurnCredit:
        """Return the one-step gains, at least 0."""
        return TurnCredit(values.rollout_id, values.values.diff().clamp(min=0.0))
