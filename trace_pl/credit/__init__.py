"""Turn-level credit: the mathematics as pure functions, the four stages, and their pipeline."""

from trace_pl.credit.anchoring import (
    anchored_turn_rewards,
    group_outcome_advantages,
    token_advantages,
)
from trace_pl.credit.gigpo import EqualStates, SimilarStates, StateMatch
from trace_pl.credit.outcomes import (
    CentredOutcome,
    LeaveOneOutOutcome,
    OutcomeBaseline,
    StandardisedOutcome,
)
from trace_pl.credit.pipeline import CreditPipeline, CreditReport
from trace_pl.credit.stages import Anchor, Backup, Prober, Segmenter
from trace_pl.credit.td import k_step_backup
from trace_pl.credit.values import (
    LinearGapValue,
    LogRatioValue,
    ProbabilityValue,
    RawLogprobValue,
    ValueTransform,
    linear_gap_values,
    log_ratio_values,
    probability_values,
    raw_logprob_values,
)

__all__ = [
    "Anchor",
    "Backup",
    "CentredOutcome",
    "CreditPipeline",
    "CreditReport",
    "EqualStates",
    "LeaveOneOutOutcome",
    "LinearGapValue",
    "LogRatioValue",
    "OutcomeBaseline",
    "ProbabilityValue",
    "Prober",
    "RawLogprobValue",
    "Segmenter",
    "SimilarStates",
    "StandardisedOutcome",
    "StateMatch",
    "ValueTransform",
    "anchored_turn_rewards",
    "group_outcome_advantages",
    "k_step_backup",
    "linear_gap_values",
    "log_ratio_values",
    "probability_values",
    "raw_logprob_values",
    "token_advantages",
]
