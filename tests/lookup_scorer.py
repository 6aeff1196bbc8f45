"""a scorer and a template that need no model: a table of scores, and letters for tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trace_pl.probes import Branch, ProbeRequest
from trace_pl.types import Rollout


class LookupScorer:
    """Answers each request with the scores written down for its rollout."""

    def __init__(self, table: Mapping[str, Tensor]) -> None:
        self.table = table
        self.requests: list[ProbeRequest] = []

    def score(self, requests: Sequence[ProbeRequest]) -> list[Tensor]:
        self.requests.extend(requests)
        return [self.table[request.rollout_id] for request in requests]


class LetterTemplate:
    """One token for each letter; in the middle of thinking the opening follows a bar."""

    answer_opening = "Answer: "

    def render(self, opening: str, answer: str, inside: bool = False) -> Branch:
        return Branch(tuple(map(ord, "|" * inside + opening)), tuple(map(ord, answer)))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def random_scorer(rollouts: Sequence[Rollout], num_aliases: int = 1, seed: int = 0) -> LookupScorer:
    """Return a scorer with a random log-prob for each boundary and alias of each rollout."""
    generator = torch.Generator().manual_seed(seed)
    return LookupScorer(
        {
            rollout.id: -9.0 * torch.rand(rollout.num_turns + 1, num_aliases, generator=generator)
            for rollout in rollouts
        }
    )
