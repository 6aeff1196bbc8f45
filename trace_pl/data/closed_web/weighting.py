"""Transcripts and notes as token ids, each with the weight of its loss."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trace_pl.data.closed_web.task import web_browser
from trace_pl.data.closed_web.transcripts import Transcript
from trace_pl.data.closed_web.world import ClosedWeb
from trace_pl.rollout.template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Note:
    """A page and its facts once more, in another order."""

    page: str
    facts: tuple[tuple[str, str], ...]
    """(relation, name) in the order in which the note states them."""


@dataclass(frozen=True, eq=False)
class WeightedTokens:
    """Token ids and the loss weight of predicting each of them."""

    ids_T: Tensor
    weights_T: Tensor


class Encoder:
    """Tokenises transcripts piece by piece, exactly as a rollout records them."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, copy_weight: float, read_weight: float
    ) -> None:
        """Prepare the template's fixed pieces.

        Args:
            tokenizer: The tokenizer, with its chat template.
            copy_weight: Loss weight of tokens that the agent did not write, but could have copied.
            read_weight: Loss weight of all others that it did not write.
        """
        schemas = web_browser(ClosedWeb(entities_per_kind=3)).schemas()
        self.template = ChatTemplate(tokenizer, schemas)
        self.copy_weight = copy_weight
        self.read_weight = read_weight

    def transcript(self, transcript: Transcript) -> WeightedTokens:
        """Return a transcript whose actions carry full weight."""
        template = self.template
        pieces = [(template.prompt_ids("", transcript.question), False)]
        for action, observation in transcript.turns:
            pieces.append((template.generation_header, False))
            pieces.append(([*template.encode_markup(action), template.end_of_turn], True))
            if observation:
                pieces.append((template.observation_open, False))
                pieces.append((template.observation_ids(observation), False))
                pieces.append((template.observation_close, False))
        return self._weighted(pieces)

    def note(self, note: Note) -> WeightedTokens:
        """Return a note of which only the names in the restated facts carry weight.

        The order of its facts is chance; learning to predict that would teach that any relation
        may come next, which is what a transcript must not believe.
        """
        encode = self.template.observation_ids
        pieces = [(encode(note.page), 0.0)]
        for relation, name in note.facts:
            pieces.append((encode(f"Its {relation} is "), 0.0))
            pieces.append((encode(name), 1.0))
            pieces.append((encode(".\n"), 0.0))
        ids = [id_ for piece, _ in pieces for id_ in piece]
        weights = [weight for piece, weight in pieces for _ in piece]
        return WeightedTokens(torch.tensor(ids), torch.tensor(weights))

    def _weighted(self, pieces: Sequence[tuple[list[int], bool]]) -> WeightedTokens:
        ids = [id_ for piece, _ in pieces for id_ in piece]
        own = [is_own for piece, is_own in pieces for _ in piece]
        weights = []
        seen: set[tuple[int, int]] = set()
        for bigram, is_own in zip(pairwise([-1, *ids]), own, strict=True):
            read = self.copy_weight if bigram in seen else self.read_weight
            weights.append(1.0 if is_own else read)
            seen.add(bigram)
        return WeightedTokens(torch.tensor(ids), torch.tensor(weights))


def similar_lengths(
    data: Sequence[WeightedTokens], batch_size: int, rng: random.Random
) -> list[list[WeightedTokens]]:
    """Return batches of rows of about one length, in random order, to waste little on padding."""
    batches = []
    for start in range(0, len(data), 16 * batch_size):
        chunk = sorted(data[start : start + 16 * batch_size], key=lambda row: len(row.ids_T))
        parts = [chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size)]
        batches += rng.sample(parts, len(parts))
    return batches
