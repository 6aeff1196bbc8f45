"""The K-step temporal-difference backup: credit of a turn from the values around and after it."""

from __future__ import annotations

import torch
from torch import Tensor

from trace_pl.errors import ConfigError, CreditError


@torch.no_grad()
def k_step_backup(values: Tensor, num_steps: int = 3, discount: float = 0.8) -> Tensor:
    """Return the discounted mean of the next K one-step gains of each turn.

    An action often pays only some turns later, when what it found is opened and read. Looking K
    steps ahead gives it a part of that gain. Dividing by the weights keeps the last turns, which
    have fewer steps ahead, on the same scale.

    Implements the K-step backup of TRACE (arXiv 2607.13988):

        delta_k = V_{k+1} - V_k
        c_k = sum_{u=k}^{h} gamma^(u-k) * delta_u / sum_{u=k}^{h} gamma^(u-k),   h = min(k+K-1, N-1)

    where K is ``num_steps`` and gamma is ``discount``. With K = 1 this is the one-step difference;
    with K >= N it is the discount-weighted mean of all later gains (Monte Carlo).

    Args:
        values: (N + 1,) value at each boundary, in nats.
        num_steps: K, at least 1; more than the number of turns means to the end.
        discount: gamma, in 0 .. 1.

    Returns:
        (N,) credit of each turn in nats, in the dtype of the input; empty when N is 0.

    Raises:
        CreditError: if there is no boundary or a value is not finite.
        ConfigError: if ``num_steps`` or ``discount`` is out of range.
    """
    check_backup_settings(num_steps, discount)
    if values.dim() != 1 or len(values) == 0:
        raise CreditError(
            f"Expected one value for each boundary, got a tensor of shape {list(values.shape)}. "
            "Check the prober."
        )
    if not values.isfinite().all():
        raise CreditError(
            f"Expected finite boundary values, got {values.tolist()}. Check the value transform."
        )
    num_turns = len(values) - 1
    if num_turns == 0:
        return values.new_empty(0)
    gains = values.diff()
    num_ahead = min(num_steps, num_turns)
    weights = discount ** torch.arange(num_ahead, dtype=values.dtype, device=values.device)
    # Zeros past the end add nothing to the sums; the divisor counts only the steps that exist.
    windows = torch.cat([gains, gains.new_zeros(num_ahead - 1)]).unfold(0, num_ahead, 1)
    steps_left = torch.arange(num_turns, 0, -1, device=values.device).clamp(max=num_ahead)
    return (windows @ weights) / weights.cumsum(0)[steps_left - 1]


def check_backup_settings(num_steps: int, discount: float) -> None:
    """Raise unless the two numbers describe a K-step backup.

    Args:
        num_steps: K, at least 1.
        discount: gamma, in 0 .. 1.

    Raises:
        ConfigError: if either is out of range.
    """
    if num_steps < 1:
        raise ConfigError(
            f"Expected num_steps of at least 1, got {num_steps}. The paper uses num_steps=3."
        )
    if not 0.0 <= discount <= 1.0:
        raise ConfigError(
            f"Expected a discount from 0 to 1, got {discount}. The paper uses discount=0.8."
        )
