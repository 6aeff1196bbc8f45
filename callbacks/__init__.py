"""What a run's config picks by name: the stages of credit assignment, and monitors of a run."""

from callbacks.anchors import OutcomeOnly, TraceAnchor
from callbacks.backups import KStepTD
from callbacks.probers import FrozenReferenceProber
from callbacks.rollout_samples import RolloutSamples
from callbacks.rollout_writer import RolloutWriter
from callbacks.run_summary import RunSummary
from callbacks.segmenters import ToolCallSegmenter
from callbacks.value_curve import ValueCurve

__all__ = [
    "FrozenReferenceProber",
    "KStepTD",
    "OutcomeOnly",
    "RolloutSamples",
    "RolloutWriter",
    "RunSummary",
    "ToolCallSegmenter",
    "TraceAnchor",
    "ValueCurve",
]
