"""How the value of a boundary is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor

from trace_pl.credit.stages import Prober
from trace_pl.credit.values import LogRatioValue, ValueTransform, checked_mean_logprobs
from trace_pl.errors import ConfigError
from trace_pl.scoring.protocol import AnswerRenderer, Branch, ProbeRequest, Scorer
from trace_pl.types import Boundaries, ProbeValues, Question, Rollout

AliasRule = Literal["max", "first", "mean"]
"""How the log-probs of several accepted answers become one: the best, the canonical, the mean."""


class FrozenReferenceProber(Prober):
    """Asks the frozen reference for the gold answer at every boundary.

    Implements the probe of TRACE (arXiv 2607.13988): the mean log-prob l_k of the gold answer's
    tokens after S_k, put through a value transform. The scorer passed in decides which model reads.

    Deviation: the paper does not give the text between S_k and the answer. Here it is the
    assistant header, a closed thinking block and ``opening``; none of it enters the mean.
    Deviation: the paper is silent on several accepted answers. By default the best one at each
    prefix counts.

    Args:
        opening: words that lead to the answer, as the policy itself would write them.
        aliases: rule for several accepted answers, applied to mean log-probs at each prefix.
        value: transform from mean log-probs to values; log-ratio with epsilon 0.1 when None.

    Raises:
        ConfigError: if ``aliases`` is not a known rule.
    """

    def __init__(
        self,
        opening: str = "<answer>",
        aliases: AliasRule = "max",
        value: ValueTransform | None = None,
    ) -> None:
        if aliases not in get_args(AliasRule):
            raise ConfigError(
                f"Expected aliases to be one of {list(get_args(AliasRule))}, got '{aliases}'. "
                "Change `credit.prober.init_args.aliases`."
            )
        self.opening = opening
        self.aliases: AliasRule = aliases
        self.value: ValueTransform = LogRatioValue() if value is None else value

    def probe(
        self,
        rollouts: Sequence[Rollout],
        boundaries: Sequence[Boundaries],
        scorer: Scorer,
        renderer: AnswerRenderer,
    ) -> list[ProbeValues]:
        """Return the values of all boundaries of all rollouts; see ``Prober.probe``."""
        # The rollouts of a group share one question: its answers are tokenised once.
        branches: dict[tuple[str, ...], tuple[Branch, ...]] = {}
        for rollout in rollouts:
            answers = self._answers(rollout.question)
            if answers not in branches:
                branches[answers] = tuple(renderer.render(self.opening, text) for text in answers)
        requests = [
            ProbeRequest(
                rollout.id,
                rollout.token_ids,
                ends.prefix_ends,
                branches[self._answers(rollout.question)],
            )
            for rollout, ends in zip(rollouts, boundaries, strict=True)
        ]
        scores = scorer.score(requests)
        return [
            self._to_values(request.rollout_id, score)
            for request, score in zip(requests, scores, strict=True)
        ]

    def _answers(self, question: Question) -> tuple[str, ...]:
        return question.answers[:1] if self.aliases == "first" else question.answers

    def _to_values(self, rollout_id: str, scores: Tensor) -> ProbeValues:
        reduced = scores.mean(dim=1) if self.aliases == "mean" else scores.amax(dim=1)
        mean_logprobs = checked_mean_logprobs(reduced, owner=f"rollout {rollout_id}")
        return ProbeValues(rollout_id, mean_logprobs, self.value(mean_logprobs))
