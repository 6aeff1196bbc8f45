"""Where every token of a branched forward goes: pure index arithmetic, no model.

A branch is ``context + answer[:-1]``: the context is the opening, or the last token of the prefix
when the opening is empty, so that every row that predicts an answer token lies in a branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_pl.errors import CreditError
from trace_pl.models.packed_attention import BranchBlock, PackedRow
from trace_pl.probes import ProbeRequest

BLOCK_TOKENS = 256
"""Most tokens of branches that attend as one block; masks grow with it, kernel calls shrink."""


@dataclass(frozen=True, eq=False)
class BranchLayout:
    """One request as a row: its trunk, then all its branches laid end to end.

    The trunk is the trajectory up to the last boundary (S tokens); the branches have P tokens and M
    scored answer tokens.
    """

    trunk_ids: Tensor
    """(S,) int64."""
    shape: tuple[int, int]
    """Boundaries (N + 1) and branches of each (A)."""
    token_ids: Tensor
    """(P,) int64."""
    starts: Tensor
    """(P,) int64, trunk tokens the branch sees, which is also the position of its first token."""
    offsets: Tensor
    """(P,) int64, place of the token in its own branch."""
    segments: Tensor
    """(P,) int64, index of the branch: boundary * A + branch."""
    rows: Tensor
    """(M,) int64, tokens whose output predicts an answer token."""
    targets: Tensor
    """(M,) int64, the answer tokens they predict."""

    @property
    def position_ids(self) -> Tensor:
        """(P,) int64, positions restart at the boundary of each branch."""
        return self.starts + self.offsets

    @property
    def row_ids(self) -> Tensor:
        """(S + P,) int64, the tokens of the whole row."""
        return torch.cat([self.trunk_ids, self.token_ids])

    @property
    def row_positions(self) -> Tensor:
        """(S + P,) int64, the positions of the whole row."""
        return torch.cat([torch.arange(len(self.trunk_ids)), self.position_ids])

    @property
    def row_picked(self) -> Tensor:
        """(M,) int64, places in the whole row that predict an answer token."""
        return len(self.trunk_ids) + self.rows

    def packed_row(self) -> PackedRow:
        """Return what attention has to know of the row."""
        return PackedRow(len(self.trunk_ids), self.blocks())

    def mean_by_branch(self, logprobs_M: Tensor) -> Tensor:
        """Return the (N + 1, A) mean of each branch's answer tokens, of (M,) log-probs."""
        segments_M = self.segments[self.rows]
        num_segments = self.shape[0] * self.shape[1]
        sums = torch.zeros(num_segments).index_add_(0, segments_M, logprobs_M)
        return (sums / torch.bincount(segments_M, minlength=num_segments)).view(self.shape)

    def __len__(self) -> int:
        """Return the tokens of the whole row."""
        return len(self.trunk_ids) + len(self.token_ids)

    def blocks(self, block_tokens: int = BLOCK_TOKENS) -> tuple[BranchBlock, ...]:
        """Return the branches in runs that attend together.

        A run sees the trajectory only up to its last boundary, so in all about half of what the
        branches would look at together, and the mask stays small.

        Args:
            block_tokens: Most tokens of a run; a longer branch forms one by itself.
        """
        lengths = torch.bincount(self.segments).tolist()
        blocks: list[BranchBlock] = []
        stop = 0
        while lengths:
            start, stop = stop, stop + lengths.pop(0)
            while lengths and stop - start + lengths[0] <= block_tokens:
                stop += lengths.pop(0)
            starts, segments = self.starts[start:stop], self.segments[start:stop]
            num_seen = int(starts.max())
            sees_trajectory = torch.arange(num_seen) < starts[:, None]
            same_branch = (segments[:, None] == segments).tril()
            blocks.append(BranchBlock(num_seen, torch.cat([sees_trajectory, same_branch], dim=1)))
        return tuple(blocks)


def lay_out_branches(request: ProbeRequest) -> BranchLayout:
    """Return the branches of every boundary of ``request``, boundary by boundary."""
    token_ids: list[int] = []
    lengths: list[int] = []
    starts: list[int] = []
    rows: list[int] = []
    targets: list[int] = []
    for end in request.prefix_ends:
        for branch in request.branches:
            context = branch.opening_ids or (int(request.token_ids[end - 1]),)
            first = len(token_ids) + len(context) - 1
            rows.extend(range(first, first + len(branch.answer_ids)))
            targets.extend(branch.answer_ids)
            token_ids.extend((*context, *branch.answer_ids[:-1]))
            lengths.append(len(context) + len(branch.answer_ids) - 1)
            starts.append(end if branch.opening_ids else end - 1)
    repeats = torch.tensor(lengths)
    first_of_branch = repeats.cumsum(0) - repeats
    return BranchLayout(
        trunk_ids=request.token_ids[: request.prefix_ends[-1]],
        shape=(len(request.prefix_ends), len(request.branches)),
        token_ids=torch.tensor(token_ids),
        starts=torch.tensor(starts).repeat_interleave(repeats),
        offsets=torch.arange(len(token_ids)) - first_of_branch.repeat_interleave(repeats),
        segments=torch.arange(len(lengths)).repeat_interleave(repeats),
        rows=torch.tensor(rows),
        targets=torch.tensor(targets),
    )


def plan_batches(costs: Sequence[int], token_budget: int) -> list[list[int]]:
    """Return groups of indices of similar cost whose padded size stays within the budget.

    A single item above the budget gets a batch of its own: it has to be scored all the same.

    Args:
        costs: tokens of each item.
        token_budget: most tokens of a batch, padding included.

    Returns:
        Batches of indices into ``costs``, longest first, so that a too large budget fails at once.
    """
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(costs)), key=lambda item: costs[item], reverse=True):
        if room == 0:
            batches.append([])
            room = max(1, token_budget // costs[index])
        batches[-1].append(index)
        room -= 1
    return batches


def require_finite_scores(scores: Tensor, rollout_id: str) -> None:
    """Raise if any score is missing, for a silent zero would mean probability one.

    Args:
        scores: (N + 1, A) mean log-probs.
        rollout_id: named in the message.

    Raises:
        CreditError: names the first non-finite score's rollout, boundary and branch.
    """
    bad = (~scores.isfinite()).nonzero()
    if len(bad):
        boundary, branch = bad[0].tolist()
        raise CreditError(
            f"Expected a finite answer log-prob in rollout {rollout_id} at boundary {boundary} for "
            f"answer {branch}, got {scores[boundary, branch].item()}. "
            "Check the scoring model's weights and precision."
        )
