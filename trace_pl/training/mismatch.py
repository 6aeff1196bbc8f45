"""How far engine and trainer are apart on the tokens that were sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from trace_pl.losses.corrections import WEIGHT_CAP
from trace_pl.training.metrics import EpochMetrics


def add_mismatch(
    metrics: EpochMetrics, trainer_BT: Tensor, sampler_BT: Tensor, mask_BT: Tensor
) -> None:
    """Add the masked tokens of a micro-batch to ``mismatch/*``.

    A policy gradient assumes that the trainer's policy drew the tokens. The engine computes with
    other kernels, and in half precision the two differ enough to matter. With d = trainer - sampler
    for each token, in nats:

        abs_nats                mean |d|
        kl                      mean exp(d) - 1 - d, the k3 estimate of KL(sampler || trainer)
        probability_correlation of exp(trainer) and exp(sampler)
        weights_above_cap       share of exp(d) above 2
    """
    # From here on in main memory: not every accelerator has float64.
    both_2M = torch.stack([trainer_BT, sampler_BT])[:, mask_BT].detach().cpu().double()
    trainer, sampler = both_2M
    difference = trainer - sampler
    metrics.average(
        {
            "mismatch/abs_nats": difference.abs(),
            "mismatch/kl": difference.expm1() - difference,
            "mismatch/weights_above_cap": (difference.exp() > WEIGHT_CAP).double(),
        }
    )
    metrics.correlate("mismatch/probability_correlation", trainer.exp(), sampler.exp())
