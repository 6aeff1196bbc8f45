"""Alarms about learning: what the policy becomes, its credit and its copy in the engine."""

from __future__ import annotations

from dataclasses import dataclass

from callbacks.alarm import Alarm, Epoch, History, first_and_last, lately, recent
from trace_pl.rollout.parity_limits import HIGH, LARGEST, MEAN

LIMIT = "{tag}/limit"
"""Under this name an epoch holds the limit of a figure of parity, which is no metric."""

_FIGURES = {MEAN: "on average", HIGH: "in the 99th percentile", LARGEST: "at most"}


@dataclass(frozen=True)
class SurprisalCollapse(Alarm):
    """The policy writes nearly the same each time, so that groups hold nothing to compare.

    A policy that is sure because it is right is well.

    Args:
        share: Largest share of the first epochs' surprisal that counts as a collapse.
    """

    name = "surprisal_collapse"
    tags = ("loss/surprisal", "rollout/success")
    share: float = 0.1

    def message(self, history: History) -> str | None:
        """Compare the last with the first epochs."""
        first, last = first_and_last(history, "loss/surprisal", self.epochs)
        is_right = history[-1].get("rollout/success", 0.0) >= 0.9
        if first <= 0.0 or last > self.share * first or is_right:
            return None
        return (
            f"Sampled tokens surprise the policy by {last:.2g} nats, {first:.2g} in the first "
            "epochs: it writes nearly the same each time. Likely the updates are too large. Lower "
            "model.optimizer.init_args.lr, raise model.loss.init_args.clip_high, or set "
            "model.loss.init_args.kl."
        )


@dataclass(frozen=True)
class TurnsCollapse(Alarm):
    """The policy stops using its tools.

    Args:
        share: Largest share of the first epochs' tool turns that counts as a collapse.
    """

    name = "turns_collapse"
    tags = ("rollout/tool_turns",)
    share: float = 0.25

    def message(self, history: History) -> str | None:
        """Compare the last with the first epochs."""
        first, last = first_and_last(history, "rollout/tool_turns", self.epochs)
        if first <= 0.0 or last > self.share * first:
            return None
        return (
            f"A rollout has {last:.2g} tool turns, {first:.2g} in the first epochs. Likely the "
            "reward can be had without tools, or the updates are too large. Look at the text "
            "rollout/0, and lower model.optimizer.init_args.lr or "
            "credit.anchor.init_args.turn_weight."
        )


@dataclass(frozen=True)
class ConstantCredit(Alarm):
    """Every turn gets the same credit, though the anchor asks for one of each."""

    name = "constant_credit"
    tags = (
        "credit/turn_credit_max",
        "credit/turn_credit_min",
        "credit/readiness_end",
        "rollout/tool_turns",
    )

    def message(self, history: History) -> str | None:
        """Compare the largest with the smallest credit; an outcome-only run has neither.

        A log-prob of exactly 0 everywhere is that of a prober which asks nobody, on purpose.
        """
        largest = recent(history, "credit/turn_credit_max", self.epochs)
        smallest = recent(history, "credit/turn_credit_min", self.epochs)
        turns = recent(history, "rollout/tool_turns", self.epochs)
        asks = any(recent(history, "credit/readiness_end", self.epochs))
        if not largest or not smallest or not turns or min(turns) <= 0.0 or not asks:
            return None
        if any(high - low > 1e-6 for high, low in zip(largest, smallest, strict=True)):
            return None
        return (
            f"Every turn got the same credit ({largest[-1]:.3g} nats) in {lately(self.epochs)}, so "
            "turns teach nothing. Likely the gold answers are equally likely after every prefix: "
            "check the answers of data.task, model.reference_name and credit.prober. Or use "
            "callbacks.OutcomeOnly as credit.anchor, which needs no credit."
        )


@dataclass(frozen=True)
class ParityDrift(Alarm):
    """The difference of engine and trainer comes close to what a push may leave.

    Args:
        share: Share of a limit above which the alarm goes off: those of mean and 99th percentile,
            beyond which the run stops, and that of the largest difference, beyond which it stops
            only if ``data.parity_tolerance`` sets it.
    """

    name = "parity_drift"
    tags = tuple(_FIGURES)
    share: float = 0.5

    def message(self, history: History) -> str | None:
        """Compare each figure with its limit."""
        lasting = [self._worst(epoch) for epoch in history[-self.epochs :]]
        if len(lasting) < self.epochs or None in lasting:
            return None
        tag = lasting[-1]
        assert tag is not None
        last = history[-1]
        return (
            f"Log-probs of engine and trainer differ by {last[tag]:.2g} nats {_FIGURES[tag]} after "
            f"a push, with {self.share:.0%} of the limit ({last[LIMIT.format(tag=tag)]:.2g}) "
            f"exceeded in {lately(self.epochs)}. Likely rounding that the limits do not know, or a "
            "weight that the engine does not take: run `trace-pl doctor` with this config. Use one "
            "dtype for model.dtype, trainer.strategy and data.engine.init_args.dtype, or set "
            "data.parity_tolerance."
        )

    def _worst(self, epoch: Epoch) -> str | None:
        """Return the figure that is furthest beyond the share of its limit, if one is."""
        shares = {
            tag: epoch[tag] / limit
            for tag in self.tags
            if tag in epoch and (limit := epoch.get(LIMIT.format(tag=tag), 0.0)) > 0.0
        }
        worst = max(shares, key=lambda tag: shares[tag], default=None)
        return worst if worst is not None and shares[worst] > self.share else None
