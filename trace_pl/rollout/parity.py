"""Proof after each weight push that the engine samples from the trainer's policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trace_pl.engines.protocol import RolloutEngine
from trace_pl.errors import WeightSyncError
from trace_pl.models.logprobs import sampled_logprobs
from trace_pl.models.weights import policy_tensors


@dataclass(frozen=True, slots=True)
class ParityReport:
    """How far engine and trainer are apart."""

    max_abs_diff: float
    """Largest difference of two log-probs of the same token, in nats."""


def check_parity(
    engine: RolloutEngine,
    policy_model: PreTrainedModel,
    prompt_ids: Sequence[int],
    tolerance: float,
) -> ParityReport:
    """Compare both sides' log-probs of a fixed prompt.

    A push can succeed and still leave old or wrong weights behind (packed kernels, routers of
    experts, cached prefixes), so the result of every push is measured, never assumed.

    Args:
        engine: the engine that was given the weights.
        policy_model: the transformers model that gave them.
        prompt_ids: T token ids, at least 2.
        tolerance: largest allowed difference in nats.

    Returns:
        The measured difference.

    Raises:
        WeightSyncError: if it is larger than the tolerance, or not a number.
    """
    device = next(policy_model.parameters()).device
    ids = torch.tensor([list(prompt_ids)], device=device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    with torch.no_grad():
        expected = sampled_logprobs(policy_model, ids, mask)[0, 1:].float().cpu()
    found = engine.prompt_logprobs(prompt_ids)
    difference = float((found - expected).abs().max())
    # Written so that NaN fails as well.
    if not difference <= tolerance:
        raise WeightSyncError(
            f"Expected log-probs of engine and trainer within {tolerance:g} nats after pushing "
            f"policy version {engine.version}, got a difference of {difference:g} on "
            f"{len(found)} tokens. {_compare(engine, policy_model)} Use the same dtype on both "
            "sides, raise `data.parity_tolerance` if half precision explains it, or use another "
            "engine for this architecture."
        )
    return ParityReport(difference)


def _compare(engine: RolloutEngine, policy_model: PreTrainedModel) -> str:
    """Say in which weights engine and trainer differ most."""
    if any(isinstance(parameter, DTensor) for parameter in policy_model.parameters()):
        # Gathering takes all ranks, and this one may be the only one that failed.
        return "The policy is sharded, so single weights were not compared."
    differences = engine.weight_differences(policy_tensors(policy_model))
    if not differences:
        return "The engine shows no weights to compare."
    worst = sorted(differences, key=lambda name: -_size(differences[name]))[:3]
    if _size(differences[worst[0]]) == 0.0:
        return (
            f"The {len(differences)} weights that the engine shows are equal, so another one is "
            "not, or it computes otherwise."
        )
    listed = ", ".join(f"'{name}' by {differences[name]:g}" for name in worst)
    return f"The weights that differ most: {listed}."


def _size(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference
