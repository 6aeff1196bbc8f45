"""Transcripts as token ids, each with the weight of its loss."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trace_pl.commands.make_base.transcripts import Transcript
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.rollout.chat.template_check import check_template
from trace_pl.tasks.closed_web.task import web_browser
from trace_pl.tasks.closed_web.world import ClosedWeb


@dataclass(frozen=True, eq=False)
class WeightedTokens:
    """Token ids and the loss weight of predicting each of them."""

    ids_T: Tensor
    weights_T: Tensor


class Encoder:
    """Tokenises transcripts piece by piece, exactly as a rollout records them."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, read_weight: float, probed_weight: float
    ) -> None:
        """Prepare the template's fixed pieces.

        Args:
            tokenizer: The tokenizer, with its chat template.
            read_weight: Loss weight of tokens that the agent did not write.
            probed_weight: Loss weight of the tokens of a probed answer.
        """
        schemas = web_browser(ClosedWeb(last_family_size=1)).schemas()
        self.template = ChatTemplate(tokenizer, schemas)
        check_template(self.template)
        self.read_weight = read_weight
        self.probed_weight = probed_weight

    def transcript(self, transcript: Transcript) -> WeightedTokens:
        """Return a transcript whose actions carry full weight, of a probed answer only its name."""
        template, read = self.template, self.read_weight
        pieces = [(template.prompt_ids("", transcript.question), read)]
        for action, observation in transcript.turns:
            pieces.append((template.generation_header, read))
            pieces.append(([*template.encode_markup(action), template.end_of_turn], 1.0))
            if observation:
                pieces.append((template.observation_open, read))
                pieces.append((template.observation_ids(observation), read))
                pieces.append((template.observation_close, read))
        if transcript.probed_answer is not None:
            branch = template.render(template.answer_opening, transcript.probed_answer)
            pieces += [
                (list(branch.opening_ids), 0.0),
                (list(branch.answer_ids), self.probed_weight),
            ]
        ids = [id_ for piece, _ in pieces for id_ in piece]
        weights = [weight for piece, weight in pieces for _ in piece]
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
