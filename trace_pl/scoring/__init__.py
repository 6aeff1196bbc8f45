"""Log-probs of given answers after given prefixes."""

from trace_pl.scoring.branched import BranchedScorer
from trace_pl.scoring.naive import PrefixScorer
from trace_pl.scoring.protocol import AnswerRenderer, Branch, ProbeRequest, Scorer

__all__ = [
    "AnswerRenderer",
    "Branch",
    "BranchedScorer",
    "PrefixScorer",
    "ProbeRequest",
    "Scorer",
]
