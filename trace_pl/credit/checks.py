"""What the pipeline holds every stage to; each message names the stage's config slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from trace_pl.errors import CreditError
from trace_pl.types import Boundaries, ProbeValues, Rollout, TokenAdvantages, TurnCredit


class _OfRollout(Protocol):
    @property
    def rollout_id(self) -> str: ...


def check_results(slot: str, rollouts: Sequence[Rollout], results: Sequence[_OfRollout]) -> None:
    """Raise unless a stage returned one result for each rollout, in order.

    Args:
        slot: config slot of the stage, e.g. ``credit.prober``.
        rollouts: what the stage was given.
        results: what it returned.

    Raises:
        CreditError: if a result is missing, superfluous or of another rollout.
    """
    expected = [rollout.id for rollout in rollouts]
    got = [result.rollout_id for result in results]
    if len(got) != len(expected):
        raise CreditError(
            f"Expected {len(expected)} results from `{slot}`, got {len(got)}. "
            "Return one result for each rollout."
        )
    for want, have in zip(expected, got, strict=True):
        if want != have:
            raise CreditError(
                f"Expected a result for rollout {want} from `{slot}`, got one for {have}. "
                "Return the results in the order of the rollouts."
            )


def check_boundaries(rollout: Rollout, boundaries: Boundaries) -> None:
    """Raise unless the boundaries lie within the rollout.

    Raises:
        CreditError: names the rollout, the place and the config slot.
    """
    if boundaries.prefix_ends[-1] > len(rollout.token_ids):
        raise CreditError(
            f"Expected boundaries within the {len(rollout.token_ids)} tokens of rollout "
            f"{rollout.id}, got {list(boundaries.prefix_ends)}. Check `credit.segmenter`."
        )


def check_values(boundaries: Boundaries, values: ProbeValues) -> None:
    """Raise unless there is one finite value and log-prob for each boundary.

    Raises:
        CreditError: names the rollout, the place and the config slot.
    """
    num_boundaries = boundaries.num_turns + 1
    _check("credit.prober", "value", "boundaries", values.rollout_id, values.values, num_boundaries)
    _check(
        "credit.prober",
        "mean log-prob",
        "boundaries",
        values.rollout_id,
        values.mean_logprobs,
        num_boundaries,
    )


def check_credit(boundaries: Boundaries, credit: TurnCredit) -> None:
    """Raise unless there is one finite number for each turn.

    Raises:
        CreditError: names the rollout, the place and the config slot.
    """
    _check(
        "credit.backup", "credit", "turns", credit.rollout_id, credit.credit, boundaries.num_turns
    )


def check_advantages(rollout: Rollout, boundaries: Boundaries, result: TokenAdvantages) -> None:
    """Raise unless the advantages fit the tokens and vanish where nothing was sampled.

    Raises:
        CreditError: names the rollout, the place and the config slot.
    """
    slot = "credit.anchor"
    _check(slot, "advantage", "tokens", rollout.id, result.advantages, len(rollout.token_ids))
    _check(slot, "turn reward", "turns", rollout.id, result.turn_rewards, boundaries.num_turns)
    stray = ((result.advantages != 0.0) & ~rollout.loss_mask).nonzero()
    if len(stray):
        position = int(stray[0])
        raise CreditError(
            f"Expected advantage 0 at token {position} of rollout {rollout.id}, which was not "
            f"sampled, got {result.advantages[position].item()}. Check `{slot}`."
        )


def _check(slot: str, what: str, places: str, rollout_id: str, got: Tensor, count: int) -> None:
    if got.shape != (count,):
        raise CreditError(
            f"Expected one {what} for each of {count} {places} of rollout {rollout_id}, got a "
            f"tensor of shape {list(got.shape)}. Check `{slot}`."
        )
    bad = (~got.isfinite()).nonzero()
    if len(bad):
        place = int(bad[0])
        raise CreditError(
            f"Expected a finite {what} at position {place} of the {places} of rollout "
            f"{rollout_id}, got {got[place].item()}. Check `{slot}`."
        )
