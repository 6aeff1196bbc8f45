"""Log-probs of given answers after given prefixes."""

from trace_pl.probes import Branch, ProbeRequest, Scorer, Template
from trace_pl.scoring.branched import BranchedScorer
from trace_pl.scoring.cache import CachedScorer, ScoreStore
from trace_pl.scoring.naive import PrefixScorer

__all__ = [
    "Branch",
    "BranchedScorer",
    "CachedScorer",
    "PrefixScorer",
    "ProbeRequest",
    "ScoreStore",
    "Scorer",
    "Template",
]
