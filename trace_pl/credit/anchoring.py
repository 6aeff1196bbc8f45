"""Ties turn credit to the outcome and spreads both over the sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trace_pl.credit.td import check_backup_settings
from trace_pl.errors import CreditError

EQUAL_REWARDS = 1e-6
"""Rewards of a group whose range is at most this are equal: nothing tells the rollouts apart."""


@torch.no_grad()
def group_outcome_advantages(rewards: Tensor) -> Tensor:
    """Return how much better each rollout's outcome is than its group's, in standard deviations.

    Equality is decided by the range and not by a small constant added to the deviation: rewards
    that differ by rounding alone would otherwise be blown up to full advantages.

    Implements the outcome advantage of TRACE (arXiv 2607.13988), which is that of GRPO:

        A_i = (R_i - mean(R)) / std(R)      std divides by G

    and A_i = 0 exactly for every member when max(R) - min(R) <= 1e-6, so also when G = 1.

    Deviation: the paper does not say when rewards count as equal.

    Args:
        rewards: (G,) outcome reward of each rollout of one question.

    Returns:
        (G,) outcome advantages, without unit, in the dtype of the input.

    Raises:
        CreditError: if a reward is not finite.
    """
    rewards = checked_rewards(rewards)
    if len(rewards) == 0 or rewards.max() - rewards.min() <= EQUAL_REWARDS:
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / rewards.std(correction=0)


def checked_rewards(rewards: Tensor) -> Tensor:
    """Return the rewards of a group, once they are known to be one finite number each.

    Raises:
        CreditError: if they are not.
    """
    if rewards.dim() != 1 or not rewards.isfinite().all():
        raise CreditError(
            f"Expected one finite reward for each rollout of a group, got {rewards.tolist()}. "
            "Check the reward function."
        )
    return rewards


@torch.no_grad()
def anchored_turn_rewards(
    credit: Tensor,
    outcome_advantage: float,
    num_steps: int = 3,
    discount: float = 0.8,
    terminal_scale: float = 2.0,
) -> Tensor:
    """Return turn credit with the outcome added to the turns whose backup reaches the end.

    Implements the outcome anchor of TRACE (arXiv 2607.13988):

        r_k = c_k + [h == N-1] * lambda * gamma^(N-k) * A,   h = min(k+K-1, N-1)

    where lambda is ``terminal_scale``, gamma is ``discount``, K is ``num_steps`` and A is
    ``outcome_advantage``. The last min(K, N) turns are reached; the very last gets gamma^1.

    Args:
        credit: (N,) credit of each turn, in nats.
        outcome_advantage: the rollout's outcome advantage.
        num_steps: K, at least 1.
        discount: gamma, in 0 .. 1.
        terminal_scale: weight of the outcome at the end.

    Returns:
        (N,) anchored turn rewards, in the dtype of the input.

    Raises:
        ConfigError: if ``num_steps`` or ``discount`` is out of range.
    """
    check_backup_settings(num_steps, discount)
    turns_left = torch.arange(len(credit), 0, -1, device=credit.device)
    terminal = terminal_scale * outcome_advantage * discount ** turns_left.to(credit.dtype)
    return credit + torch.where(turns_left <= num_steps, terminal, 0.0)


@torch.no_grad()
def token_advantages(
    loss_mask: Tensor,
    prefix_ends: Sequence[int],
    turn_rewards: Tensor,
    outcome_advantage: float,
    outcome_weight: float = 1.0,
    turn_weight: float = 0.2,
    answer_reward: float = 0.0,
) -> Tensor:
    """Return the advantage of each token: the outcome's for all, the turn's for its own action.

    Implements the token advantage of TRACE (arXiv 2607.13988):

        advantage_t = alpha_out * A + alpha_turn * r_k     sampled t in action k+1
        advantage_t = alpha_out * A                        sampled t after the last observation

    and 0 for every token that was not sampled. Action k+1 lies between the ends of S_k and S_{k+1}.
    Turn rewards are never normalised over the group or over turns. Methods that hold the final
    answer to account as they do turns add alpha_turn * ``answer_reward`` to the second line.

    Args:
        loss_mask: (T,) bool, true on sampled tokens.
        prefix_ends: N + 1 token counts; S_k is the first ``prefix_ends[k]`` tokens.
        turn_rewards: (N,) anchored turn rewards.
        outcome_advantage: the rollout's outcome advantage, A.
        outcome_weight: alpha_out.
        turn_weight: alpha_turn.
        answer_reward: reward of the final answer as an action of its own; the paper has none.

    Returns:
        (T,) advantages, in the dtype of ``turn_rewards``.

    Raises:
        CreditError: if the counts do not fit each other or the rollout.
    """
    if len(turn_rewards) != len(prefix_ends) - 1:
        raise CreditError(
            f"Expected {len(prefix_ends) - 1} turn rewards for {len(prefix_ends)} boundaries, got "
            f"{len(turn_rewards)}. Check the backup."
        )
    if prefix_ends[-1] > len(loss_mask):
        raise CreditError(
            f"Expected boundaries within the {len(loss_mask)} tokens of the rollout, got an end at "
            f"{prefix_ends[-1]}. Check the segmenter."
        )
    device = turn_rewards.device
    positions = torch.arange(len(loss_mask), device=device)
    ends = torch.tensor(prefix_ends, device=device)
    # 0 is the prompt, k + 1 the tokens of turn k, N + 1 whatever follows the last observation.
    spans = torch.searchsorted(ends, positions, right=True)
    outcome = outcome_weight * outcome_advantage
    final = turn_rewards.new_tensor([outcome + turn_weight * answer_reward])
    by_span = torch.cat([torch.zeros_like(final), outcome + turn_weight * turn_rewards, final])
    return torch.where(loss_mask.to(device), by_span[spans], 0.0)
