"""Scores all boundaries of a trajectory while reading the trajectory once.

Reading each prefix anew costs tokens in the square of the number of turns. Here the trajectory is
read once with plain causal attention and leaves its keys and values; then every branch of every
boundary is read at once, each seeing the trajectory up to its own boundary and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trace_pl.errors import ConfigError
from trace_pl.scoring.head import token_logprobs
from trace_pl.scoring.layout import (
    BranchLayout,
    lay_out_branches,
    plan_batches,
    require_finite_scores,
)
from trace_pl.scoring.protocol import ProbeRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PAD_SEGMENT = -1


class BranchedScorer:
    """Reads each trajectory once and all its answer branches with it.

    Equal to :class:`trace_pl.scoring.naive.PrefixScorer` up to rounding. Two passes through the
    whole model for each batch: one over trajectories, one over their branches. The head is applied
    only to rows that predict an answer token.

    Args:
        model: causal language model of the Qwen3 or Llama kind with full attention everywhere and
            ``attn_implementation="sdpa"``, in evaluation mode, on any device.
        token_budget: most tokens of one batch, padding and branches included. Only a trajectory
            that is longer by itself goes beyond it.

    Raises:
        ConfigError: if the model would not honour an attention mask of its own, or the budget is
            below one.
    """

    def __init__(self, model: PreTrainedModel, token_budget: int = 16_384) -> None:
        _require_maskable(model)
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
        for batch in plan_batches(costs, self.token_budget):
            results = self._score_batch([requests[i] for i in batch], [layouts[i] for i in batch])
            for index, result in zip(batch, results, strict=True):
                require_finite_scores(result, requests[index].rollout_id)
                scores[index] = result
        return scores

    def _score_batch(
        self, requests: Sequence[ProbeRequest], layouts: Sequence[BranchLayout]
    ) -> list[Tensor]:
        device = self.model.device
        decoder, head = self.model.get_decoder(), self.model.get_output_embeddings()
        trajectory_ids = pad_sequence(
            [request.token_ids[: request.prefix_ends[-1]] for request in requests],
            batch_first=True,
        )
        # Right padding needs no mask here: causal attention never looks at later tokens.
        read = decoder(input_ids=trajectory_ids.to(device), use_cache=True)
        hidden_BPD = decoder(
            input_ids=_pad([layout.token_ids for layout in layouts], 0).to(device),
            position_ids=_pad([layout.position_ids for layout in layouts], 0).to(device),
            attention_mask=_branch_mask(layouts, trajectory_ids.shape[1], device),
            past_key_values=read.past_key_values,
            use_cache=True,
        ).last_hidden_state
        rows = [layout.rows.to(device) for layout in layouts]
        logprobs = token_logprobs(
            head,
            torch.cat([hidden_BPD[row, places] for row, places in enumerate(rows)]),
            torch.cat([layout.targets for layout in layouts]).to(device),
        ).cpu()
        return [
            _mean_by_branch(part, request, layout)
            for part, request, layout in zip(
                logprobs.split([len(places) for places in rows]), requests, layouts, strict=True
            )
        ]


def _pad(sequences: list[Tensor], value: int) -> Tensor:
    return pad_sequence(sequences, batch_first=True, padding_value=value)


def _branch_mask(
    layouts: Sequence[BranchLayout], trajectory_length: int, device: torch.device
) -> Tensor:
    """(B, 1, P, T + P) bool: the trajectory up to the boundary, then the branch itself."""
    starts = _pad([layout.starts for layout in layouts], 0).to(device)
    segments = _pad([layout.segments for layout in layouts], _PAD_SEGMENT).to(device)
    sees_trajectory = torch.arange(trajectory_length, device=device) < starts[:, :, None]
    # Padding tokens form a segment of their own, so no row of the mask is empty: a softmax over
    # nothing is NaN on some kernels.
    same_branch = segments[:, :, None] == segments[:, None, :]
    return torch.cat([sees_trajectory, same_branch.tril()], dim=2)[:, None]


def _mean_by_branch(logprobs: Tensor, request: ProbeRequest, layout: BranchLayout) -> Tensor:
    """(N + 1, A) float32, from (M,) log-probs of the answers' tokens."""
    segments = layout.segments[layout.rows]
    num_segments = len(request.prefix_ends) * len(request.branches)
    sums = torch.zeros(num_segments).index_add_(0, segments, logprobs)
    counts = torch.bincount(segments, minlength=num_segments)
    return (sums / counts).view(len(request.prefix_ends), len(request.branches))


def _require_maskable(model: PreTrainedModel) -> None:
    # Flash kernels ignore a 4-D mask without a word, and every branch would then see every other.
    attention = model.config._attn_implementation
    if attention != "sdpa":
        raise ConfigError(
            f"Expected a scoring model with attention 'sdpa', got '{attention}'. "
            "Load it with attn_implementation='sdpa'."
        )
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"Expected a scoring model with full attention in every layer, got {sorted(kinds)}. "
            "Use PrefixScorer for it."
        )
