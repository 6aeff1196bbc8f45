"""How far engine and trainer are apart on the tokens that were sampled."""

from __future__ import annotations

import math

import torch
from torch import Tensor

WEIGHT_CAP = 2.0
"""Importance weights above it are counted; the default cap of the corrections."""


class SamplerMismatch:
    """Collects both sides' log-probs of an epoch's tokens and describes their difference.

    A policy gradient assumes that the trainer's policy drew the tokens. The engine computes with
    other kernels, and in half precision the two differ enough to matter.
    """

    def __init__(self) -> None:
        self._pairs: list[Tensor] = []

    def add(self, trainer_BT: Tensor, sampler_BT: Tensor, mask_BT: Tensor) -> None:
        """Remember the masked tokens of a micro-batch."""
        self._pairs.append(torch.stack([trainer_BT[mask_BT], sampler_BT[mask_BT]]).detach().cpu())

    def compute(self) -> dict[str, float]:
        """Return the figures of all tokens, and forget them.

        With d = trainer - sampler for each token, in nats:

            abs_nats                mean |d|
            kl                      mean exp(d) - 1 - d, the k3 estimate of KL(sampler || trainer)
            probability_correlation of exp(trainer) and exp(sampler)
            weights_above_cap       share of exp(d) above 2

        NaN where it is not defined, and everywhere without tokens.
        """
        pairs, self._pairs = self._pairs, []
        trainer, sampler = torch.cat(pairs, dim=1).double() if pairs else torch.empty(2, 0)
        difference = trainer - sampler
        probabilities = torch.stack([trainer.exp(), sampler.exp()])
        has_spread = len(trainer) > 1 and bool((probabilities.std(dim=1) > 0.0).all())
        correlation = float(torch.corrcoef(probabilities)[0, 1]) if has_spread else math.nan
        return {
            "abs_nats": float(difference.abs().mean()),
            "kl": float((difference.expm1() - difference).mean()),
            "probability_correlation": correlation,
            "weights_above_cap": float((difference.exp() > WEIGHT_CAP).double().mean()),
        }
