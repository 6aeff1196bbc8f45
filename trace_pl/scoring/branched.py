"""Scores all boundaries of a trajectory while reading the trajectory once.

Reading each prefix anew costs tokens in the square of the number of turns. Here the trajectory is
read once, and in the same pass every branch of every boundary, each seeing the trajectory up to its
own boundary and itself. Nothing is padded, and no layer but the current one keeps keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trace_pl.distributed.same_number import same_number
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
        ConfigError: if the model can not read packed rows, or the budget is below one.
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
        layouts = [lay_out_branches(request) for request in requests]
        costs = [
            request.prefix_ends[-1] + len(layout.token_ids)
            for request, layout in zip(requests, layouts, strict=True)
        ]
        scores: list[Tensor] = [torch.empty(0)] * len(requests)
        batches = bins_within(costs, self.token_budget)
        for batch in same_number(batches, self.model):
            if not batch:
                self._join_forward()
                continue
            results = self._score_batch([requests[i] for i in batch], [layouts[i] for i in batch])
            for index, result in zip(batch, results, strict=True):
                require_finite_scores(result, requests[index].rollout_id)
                scores[index] = result
        return scores

    def _join_forward(self) -> None:
        """Take part in a forward of a sharded model with nothing of one's own to score."""
        nothing = torch.zeros(1, dtype=torch.long, device=self.model.device)
        packed_logprobs(self.model, nothing, nothing, [PackedRow(1)], nothing[:0], nothing[:0])

    def _score_batch(
        self, requests: Sequence[ProbeRequest], layouts: Sequence[BranchLayout]
    ) -> list[Tensor]:
        device = self.model.device
        trunks = [request.token_ids[: request.prefix_ends[-1]] for request in requests]
        pairs = list(zip(trunks, layouts, strict=True))
        lengths = torch.tensor([x for t, b in pairs for x in (len(t), len(b.token_ids))])
        first_of_branches = (lengths.cumsum(0) - lengths)[1::2].tolist()
        picked = torch.cat([s + b.rows for s, b in zip(first_of_branches, layouts, strict=True)])
        logprobs = packed_logprobs(
            self.model,
            torch.cat([x for t, b in pairs for x in (t, b.token_ids)]).to(device),
            torch.cat([x for t, b in pairs for x in (torch.arange(len(t)), b.position_ids)]).to(
                device
            ),
            [PackedRow(len(t), b.blocks()).to(device) for t, b in pairs],
            picked.to(device),
            torch.cat([layout.targets for layout in layouts]).to(device),
        ).cpu()
        return [
            _mean_by_branch(part, request, layout)
            for part, request, layout in zip(
                logprobs.split([len(layout.rows) for layout in layouts]),
                requests,
                layouts,
                strict=True,
            )
        ]


def _mean_by_branch(logprobs: Tensor, request: ProbeRequest, layout: BranchLayout) -> Tensor:
    """(N + 1, A) float32, from (M,) log-probs of the answers' tokens."""
    segments = layout.segments[layout.rows]
    num_segments = len(request.prefix_ends) * len(request.branches)
    sums = torch.zeros(num_segments).index_add_(0, segments, logprobs)
    counts = torch.bincount(segments, minlength=num_segments)
    return (sums / counts).view(len(request.prefix_ends), len(request.branches))
