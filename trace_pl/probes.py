"""What a stage asks of a scorer: log-probs of given answers after given prefixes.

The credit stages know only these types, so they are tested with a lookup table and run unchanged
on any model that can score text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from torch import Tensor

from trace_pl.errors import CreditError


@dataclass(frozen=True, slots=True)
class Branch:
    """One way to state an answer right after a prefix."""

    opening_ids: tuple[int, ...]
    """Teacher-forced tokens before the answer; they are read but never scored. May be empty."""
    answer_ids: tuple[int, ...]
    """The scored tokens."""

    def __post_init__(self) -> None:
        if not self.answer_ids:
            raise CreditError(
                "Expected at least one answer token in a branch, got none. "
                "Does the tokenizer drop every character of the gold answer?"
            )


@dataclass(frozen=True, eq=False)
class ProbeRequest:
    """Score every branch after every prefix of one rollout."""

    rollout_id: str
    token_ids: Tensor
    """(T,) int64, the rollout's token record; tokens beyond the last prefix are ignored."""
    prefix_ends: tuple[int, ...]
    """N + 1 strictly increasing token counts, each in 1 .. T."""
    branches: tuple[Branch, ...]
    """A branches, the same at every prefix."""

    def __post_init__(self) -> None:
        ends = self.prefix_ends
        is_rising = all(a < b for a, b in pairwise(ends))
        if not ends or not is_rising or ends[0] < 1 or ends[-1] > len(self.token_ids):
            raise CreditError(
                f"Expected strictly increasing prefix ends within 1 .. {len(self.token_ids)} in "
                f"rollout {self.rollout_id}, got {list(ends)}. Check the segmenter."
            )
        if not self.branches:
            raise CreditError(
                f"Expected at least one answer branch for rollout {self.rollout_id}, got none. "
                "Give the question a gold answer."
            )


class Scorer(Protocol):
    """Anything that gives mean answer log-probs for a batch of requests.

    A prober knows what to ask, a scorer how to read it from a model. One may read every prefix by
    itself (``PrefixScorer``, the oracle), another the whole trajectory once with all answers as
    branches (``BranchedScorer``), a third remember what was asked before (``CachedScorer``). All
    give the same numbers up to rounding. Any object with this method will do.
    """

    def score(self, requests: Sequence[ProbeRequest]) -> list[Tensor]:
        """Return the mean log-prob of each answer after each prefix.

        With S_k the k-th prefix, w_a the opening and y_a1 .. y_an the answer of branch a (TRACE,
        arXiv 2607.13988, value definition):

            score[k, a] = (1/n) * sum_t log pi(y_at | S_k, w_a, y_a<t)

        at temperature 1, with the log-softmax taken in float32.

        Args:
            requests: what to score; requests may differ in every length.

        Returns:
            One (N + 1, A) float32 CPU tensor in nats per request, in the order of the requests.

        Raises:
            CreditError: if a score is not finite; it names rollout, boundary and branch.
        """
        ...


class Template(Protocol):
    """What a stage may ask of the model's chat template."""

    @property
    def answer_opening(self) -> str:
        """What the policy writes before a final answer."""
        ...

    def render(self, opening: str, answer: str, inside: bool = False) -> Branch:
        """Return the branch that states ``answer`` after the words ``opening``.

        Args:
            opening: text between the start of the assistant's message and the answer.
            answer: one accepted gold answer.
            inside: whether the prefix ends in the middle of the assistant's own thinking.

        Returns:
            As ``opening_ids`` the assistant header and a closed thinking block, or only the end of
            the thinking that is open, then the opening; the answer alone as ``answer_ids``.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        ...
