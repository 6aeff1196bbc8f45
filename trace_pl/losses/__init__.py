"""Policy losses: small classes for the config slot ``model.loss``.

A clipped surrogate is chosen by class; how it is averaged over the global batch, corrected for the
sampler and held to the reference are settings of it, each a small class again.
"""

from trace_pl.losses.clipped import ClippedLoss, SequenceClip, TokenClip
from trace_pl.losses.corrections import (
    ImportanceCorrection,
    OffPolicyTokenWeights,
    TruncatedSequenceWeights,
    TruncatedTokenWeights,
)
from trace_pl.losses.inputs import LossInputs, LossOutputs, PolicyLoss
from trace_pl.losses.kl import KLPenalty
from trace_pl.losses.normalisers import ConstantLength, Normaliser, TokenMean, TrajectoryMean

__all__ = [
    "ClippedLoss",
    "ConstantLength",
    "ImportanceCorrection",
    "KLPenalty",
    "LossInputs",
    "LossOutputs",
    "Normaliser",
    "OffPolicyTokenWeights",
    "PolicyLoss",
    "SequenceClip",
    "TokenClip",
    "TokenMean",
    "TrajectoryMean",
    "TruncatedSequenceWeights",
    "TruncatedTokenWeights",
]
