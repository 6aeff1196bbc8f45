"""The one forward that training and scoring need: log-probs of picked tokens of packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from trace_pl.models.head import token_logprobs
from trace_pl.models.packed_attention import PackedRow

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORWARD = "packed_logprobs"
"""Name under which a sharded model has :func:`read_rows` as a method, to gather its weights around
it: FSDP knows only of a module's own forward, which would make all logits."""


def packed_logprobs(
    model: PreTrainedModel,
    token_ids_L: Tensor,
    position_ids_L: Tensor,
    rows: Sequence[PackedRow],
    picked: Tensor,
    targets_M: Tensor,
) -> Tensor:
    """Return log-probs of given tokens after given places of rows that lie end to end.

    Args:
        model: A transformers causal language model with packed attention, sharded or not.
        token_ids_L: (L,) int64, all rows.
        position_ids_L: (L,) int64, place of each token in its row.
        rows: The rows' lengths and branches.
        picked: Places that predict a target: (M,) int64, or (L,) bool with M true.
        targets_M: (M,) int64.

    Returns:
        (M,) float32 in nats. It depends on the parameters even when M is zero.
    """
    forward = getattr(model, FORWARD, None) or partial(read_rows, model)
    logprobs_M: Tensor = forward(token_ids_L, position_ids_L, rows, picked, targets_M)
    return logprobs_M


def read_rows(
    model: PreTrainedModel,
    token_ids_L: Tensor,
    position_ids_L: Tensor,
    rows: Sequence[PackedRow],
    picked: Tensor,
    targets_M: Tensor,
) -> Tensor:
    """Do what :func:`packed_logprobs` says, on a model whose weights are there.

    A model that rests in main memory computes elsewhere: FSDP moves the tensors among the arguments
    there, but not those inside the rows.
    """
    rows = [row.to(token_ids_L.device) for row in rows]
    hidden_LD = model.get_decoder()(
        input_ids=token_ids_L[None],
        position_ids=position_ids_L[None],
        packed_rows=rows,
        use_cache=False,
    ).last_hidden_state[0]
    return token_logprobs(model.get_output_embeddings(), hidden_LD[picked], targets_M)
