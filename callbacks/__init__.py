"""What a run's config picks by name: the stages of credit assignment, and monitors of a run."""

from callbacks.anchors import GiGPOAnchor, OutcomeOnly, TraceAnchor
from callbacks.backups import KStepTD, MonteCarlo, PositiveGain, ReturnToGo
from callbacks.controls import EvidenceProber, FlippedCredit, NoisyCredit, ShuffledCredit
from callbacks.environment_prober import EnvironmentProber
from callbacks.group_anchors import (
    A2TGPOAnchor,
    AnswerLikelihood,
    IGPOAnchor,
    ReadinessBaseline,
    TurnwiseAnchor,
)
from callbacks.health_monitor import HealthMonitor
from callbacks.probers import FrozenReferenceProber, NoProber, PolicyProber
from callbacks.rollout_samples import RolloutSamples
from callbacks.rollout_writer import RolloutWriter
from callbacks.run_summary import RunSummary
from callbacks.segmenters import FixedTokenSegmenter, ReasoningSegmenter, ToolCallSegmenter
from callbacks.value_curve import ValueCurve

__all__ = [
    "A2TGPOAnchor",
    "AnswerLikelihood",
    "EnvironmentProber",
    "EvidenceProber",
    "FixedTokenSegmenter",
    "FlippedCredit",
    "FrozenReferenceProber",
    "GiGPOAnchor",
    "HealthMonitor",
    "IGPOAnchor",
    "KStepTD",
    "MonteCarlo",
    "NoProber",
    "NoisyCredit",
    "OutcomeOnly",
    "PolicyProber",
    "PositiveGain",
    "ReadinessBaseline",
    "ReasoningSegmenter",
    "ReturnToGo",
    "RolloutSamples",
    "RolloutWriter",
    "RunSummary",
    "ShuffledCredit",
    "ToolCallSegmenter",
    "TraceAnchor",
    "TurnwiseAnchor",
    "ValueCurve",
]
