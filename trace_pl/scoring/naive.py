"""Scores answers the obvious way: one row for each prefix and answer. The oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trace_pl.errors import ConfigError
from trace_pl.probes import Branch, ProbeRequest
from trace_pl.scoring.layout import plan_batches, require_finite_scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PrefixScorer:
    """Reads ``prefix + opening + answer`` anew for every prefix and answer.

    It needs nothing special of the model's attention and shares no indexing with
    :class:`trace_pl.scoring.BranchedScorer`, which must agree with it. Tokens grow with
    the square of the number of turns.

    Args:
        model: causal language model in evaluation mode, on any device.
        max_tokens_per_batch: most tokens of one right-padded forward; a longer row goes alone.

    Raises:
        ConfigError: if ``max_tokens_per_batch`` is below one.
    """

    def __init__(self, model: PreTrainedModel, max_tokens_per_batch: int = 16_384) -> None:
        if max_tokens_per_batch < 1:
            raise ConfigError(
                f"Expected at least 1 token per scoring batch, got {max_tokens_per_batch}. "
                "Raise max_tokens_per_batch."
            )
        self.model = model
        self.max_tokens_per_batch = max_tokens_per_batch

    @torch.no_grad()
    def score(self, requests: Sequence[ProbeRequest]) -> list[Tensor]:
        """Return the mean log-prob of each answer after each prefix; see ``Scorer.score``."""
        rows = [
            (_row_tokens(request, end, branch), len(branch.answer_ids))
            for request in requests
            for end in request.prefix_ends
            for branch in request.branches
        ]
        means = torch.empty(len(rows))
        for batch in plan_batches([len(ids) for ids, _ in rows], self.max_tokens_per_batch):
            means[batch] = self._score_rows([rows[index] for index in batch])
        scores: list[Tensor] = []
        start = 0
        for request in requests:
            num_prefixes, num_branches = len(request.prefix_ends), len(request.branches)
            stop = start + num_prefixes * num_branches
            scores.append(means[start:stop].view(num_prefixes, num_branches))
            require_finite_scores(scores[-1], request.rollout_id)
            start = stop
        return scores

    def _score_rows(self, rows: Sequence[tuple[Tensor, int]]) -> Tensor:
        """(len(rows),) mean log-prob of the last ``num_answer`` tokens of each row."""
        device = self.model.device
        ids = pad_sequence([row for row, _ in rows], batch_first=True).to(device)
        lengths = torch.tensor([len(row) for row, _ in rows], device=device)
        is_token = torch.arange(ids.shape[1], device=device) < lengths[:, None]
        first_scored = min(len(row) - num_answer for row, num_answer in rows)
        num_kept = ids.shape[1] - first_scored + 1
        logits = self.model(
            input_ids=ids,
            attention_mask=is_token.long(),
            use_cache=False,
            logits_to_keep=num_kept,
        ).logits
        means = []
        for row_logits, row_ids, (row, num_answer) in zip(logits, ids, rows, strict=True):
            start = len(row) - num_answer
            answer = row_ids[start : len(row)]
            # The output at one token predicts the next one, and the first kept row is
            # the one before ``first_scored``.
            predicting = row_logits[start - first_scored : len(row) - first_scored]
            logprobs = predicting.float().log_softmax(dim=-1)
            means.append(logprobs.gather(1, answer[:, None]).mean())
        return torch.stack(means).cpu()


def _row_tokens(request: ProbeRequest, prefix_end: int, branch: Branch) -> Tensor:
    tail = torch.tensor(branch.opening_ids + branch.answer_ids)
    return torch.cat([request.token_ids[:prefix_end].cpu(), tail])
