"""Where the prefixes of a rollout end."""

from __future__ import annotations

from trace_pl.errors import CreditError
from trace_pl.types import Boundaries, Rollout


def tool_call_boundaries(rollout: Rollout) -> Boundaries:
    """Return one boundary after the prompt and one after each tool observation.

    Implements the states of TRACE (arXiv 2607.13988): S_0 is the prompt, S_k the exact tokens up to
    the end of observation k. What the policy writes after the last observation, be it the answer or
    a response that was cut, is no transition.

    Args:
        rollout: one finished trajectory with N completed tool turns.

    Returns:
        N + 1 prefix ends, as indices recorded when the tokens were appended.

    Raises:
        CreditError: if an end does not rise or lies beyond the rollout.
    """
    ends = (rollout.prompt_length, *(turn.observation_stop for turn in rollout.turns))
    if ends[-1] > len(rollout.token_ids):
        raise CreditError(
            f"Expected observations within the {len(rollout.token_ids)} tokens of rollout "
            f"{rollout.id}, got one that ends at {ends[-1]}. Check how its turns were recorded."
        )
    return Boundaries(rollout.id, ends)
