"""What a run's config picks by name: the stages of credit assignment, and monitors of a run."""

from callbacks.anchors import GiGPOAnchor, OutcomeOnly, TraceAnchor
from callbacks.backups import KStepTD, MonteCarlo, ShuffledKStepTD
from callbacks.health_monitor import HealthMonitor
from callbacks.probers import FrozenReferenceProber, NoProber, PolicyProber
from callbacks.rollout_samples import RolloutSamples
from callbacks.rollout_writer import RolloutWriter
from callbacks.run_summary import RunSummary
from callbacks.segmenters import FixedTokenSegmenter, ReasoningSegmenter, ToolCallSegmenter
from callbacks.value_curve import ValueCurve

__all__ = [
    "FixedTokenSegmenter",
    "FrozenReferenceProber",
    "GiGPOAnchor",
    "HealthMonitor",
    "KStepTD",
    "MonteCarlo",
    "NoProber",
    "OutcomeOnly",
    "PolicyProber",
    "ReasoningSegmenter",
    "RolloutSamples",
    "RolloutWriter",
    "RunSummary",
    "ShuffledKStepTD",
    "ToolCallSegmenter",
    "TraceAnchor",
    "ValueCurve",
]
