"""Scores all boundaries of a trajectory while reading the trajectory once.

Reading each prefix anew costs tokens in the square of the number of turns. Here the trajectory is
read once, and in the same pass every branch of every boundary, each seeing the trajectory up to its
own boundary and itself. Nothing is padded, and no layer but the current one keeps keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trace_pl.distributed.padding import pad_batches
from trace_pl.errors import ConfigError
from trace_pl.models.packed_attention import PackedRow, require_packed_attention
from trace_pl.models.packed_forward import packed_logprobs
from trace_pl.models.packing import bins_within
from trace_pl.probes import ProbeRequest
from trace_pl.scoring.layout import (
    BranchLayout,
    lay_out_branches,
    require_finite_scores,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BranchedScorer:
    """Reads each trajectory once and all its answer branches with it.

    Equal to :class:`trace_pl.scoring.PrefixScorer` up to rounding. The head is applied only
    to rows that predict an answer token.

    Args:
        model: causal language model of the Qwen3 or Llama kind with full attention everywhere,
            loaded with packed attention, in evaluation mode, on any device.
        token_budget: most tokens of one batch, branches included. Only a trajectory that is longer
            by itself goes beyond it.

    Raises:
        ConfigError: if the model cannot read packed rows, or the budget is below one.
    """

    def __init__(self, model: PreTrainedModel, token_budget: int = 16_384) -> None:
        require_packed_attention(model)
        if token_budget < 1:
            raise ConfigError(
                f"Expected a scorer token budget of at least 1, got {token_budget}. Raise it."
            )
        self.model = model
        self.token_budget = token_budget

    @torch.no_grad()
    def score(self, requests: Sequence[ProbeRequest]) -> list[Tensor]:
        """Return the mean log-prob of each answer after each prefix; see ``Scorer.score``."""
        rows = [lay_out_branches(request) for request in requests]
        scores: list[Tensor] = [torch.empty(0)] * len(rows)
        batches = bins_within([len(row) for row in rows], self.token_budget)
        for batch in pad_batches(batches, self.model):
            if not batch:
                self._join_forward()
                continue
            for index, result in zip(batch, self._score([rows[i] for i in batch]), strict=True):
                require_finite_scores(result, requests[index].rollout_id)
                scores[index] = result
        return scores

    def _join_forward(self) -> None:
        """Take part in a forward of a sharded model with nothing of one's own to score."""
        nothing = torch.zeros(1, dtype=torch.long, device=self.model.device)
        packed_logprobs(self.model, nothing, nothing, [PackedRow(1)], nothing[:0], nothing[:0])

    def _score(self, rows: Sequence[BranchLayout]) -> list[Tensor]:
        """Return the (N + 1, A) scores of each row, all read in one forward."""
        device = self.model.device
        starts = accumulate(map(len, rows[:-1]), initial=0)
        picked = [start + row.row_picked for start, row in zip(starts, rows, strict=True)]
        logprobs_M = packed_logprobs(
            self.model,
            token_ids_L=torch.cat([row.row_ids for row in rows]).to(device),
            position_ids_L=torch.cat([row.row_positions for row in rows]).to(device),
            rows=[row.packed_row().to(device) for row in rows],
            picked=torch.cat(picked).to(device),
            targets_M=torch.cat([row.targets for row in rows]).to(device),
        )
        parts = logprobs_M.cpu().split([len(row.targets) for row in rows])
        return [row.mean_by_branch(part) for row, part in zip(rows, parts, strict=True)]
