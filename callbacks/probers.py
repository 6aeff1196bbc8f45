"""How the value of a boundary is measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from trace_pl.credit.stages import Prober, Reader
from trace_pl.credit.values import LogRatioValue, ValueTransform, checked_mean_logprobs
from trace_pl.errors import ConfigError
from trace_pl.probes import Branch, ProbeRequest, Scorer, Template
from trace_pl.types import Boundaries, ProbeValues, Question, Rollout, TokenKind

AliasRule = Literal["max", "first", "mean", "total"]
"""How the log-probs of several accepted answers become one: the best, the canonical, the mean, or
the log of their summed probabilities, each of the whole answer and not of a token."""


class FrozenReferenceProber(Prober):
    """Asks the frozen reference for the gold answer at every boundary.

    Implements the probe of TRACE (arXiv 2607.13988): the mean log-prob l_k of the gold answer's
    tokens after S_k, put through a value transform. The scorer passed in decides which model reads.

    Deviation: the paper does not give the text between S_k and the answer. Here it is the
    assistant header, a closed thinking block and ``opening``; none of it enters the mean. A
    boundary in the middle of thinking gets the end of it instead of the header.
    Deviation: the paper is silent on several accepted answers. By default the best one at each
    prefix counts.

    Args:
        opening: words that lead to the answer; None takes those of `data.answer_format`, as the
            policy itself writes them.
        aliases: rule for several accepted answers, applied to mean log-probs at each prefix.
        value: transform from mean log-probs to values; log-ratio with epsilon 0.1 when None.

    Raises:
        ConfigError: if ``aliases`` is not a known rule.
    """

    def __init__(
        self,
        opening: str | None = None,
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
        template: Template,
    ) -> list[ProbeValues]:
        """Return the values of all boundaries of all rollouts; see ``Prober.probe``."""
        opening = template.answer_opening if self.opening is None else self.opening
        # The rollouts of a group share one question, so its answers are tokenised once.
        branches = cache(partial(_branches, template, opening))
        levels = [torch.empty(ends.num_turns + 1) for ends in boundaries]
        requests: list[ProbeRequest] = []
        targets: list[tuple[Tensor, list[int], list[int]]] = []  # where each request's scores go
        for rollout, ends, level in zip(rollouts, boundaries, levels, strict=True):
            answers = self._answers(rollout.question)
            for inside, numbers in _by_place(rollout, ends).items():
                prefix_ends = tuple(ends.prefix_ends[k] for k in numbers)
                asked = branches(answers, inside)
                requests.append(ProbeRequest(rollout.id, rollout.token_ids, prefix_ends, asked))
                targets.append((level, numbers, [len(branch.answer_ids) for branch in asked]))
        for (level, numbers, lengths), scores in zip(targets, scorer.score(requests), strict=True):
            level[numbers] = self._reduced(scores, lengths)
        return [self._to_values(r.id, level) for r, level in zip(rollouts, levels, strict=True)]

    def _answers(self, question: Question) -> tuple[str, ...]:
        return question.answers[:1] if self.aliases == "first" else question.answers

    def _reduced(self, scores: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return one log-prob for each boundary, of one for each boundary and accepted answer."""
        if self.aliases == "total":
            # An answer and a longer one that begins with it are not exclusive, so 0 can be passed.
            return (scores * torch.tensor(lengths)).logsumexp(dim=1).clamp(max=0.0)
        return scores.mean(dim=1) if self.aliases == "mean" else scores.amax(dim=1)

    def _to_values(self, rollout_id: str, logprobs: Tensor) -> ProbeValues:
        mean_logprobs = checked_mean_logprobs(logprobs, owner=f"rollout {rollout_id}")
        return ProbeValues(rollout_id, mean_logprobs, self.value(mean_logprobs))


class PolicyProber(FrozenReferenceProber):
    """Asks the policy itself, as it is at the start of the epoch, instead of the reference.

    An ablation: the yardstick moves while the policy learns, so values of different epochs cannot
    be compared, and a policy that grows sure of its answers earns credit for that alone.
    """

    reader: ClassVar[Reader] = "policy"


class NoProber(Prober):
    """Finds every boundary equally good, so that only the outcome trains."""

    reader: ClassVar[Reader] = "none"

    def probe(
        self,
        rollouts: Sequence[Rollout],
        boundaries: Sequence[Boundaries],
        scorer: Scorer,
        template: Template,
    ) -> list[ProbeValues]:
        """Return zeros; see ``Prober.probe``."""
        zeros = [torch.zeros(ends.num_turns + 1) for ends in boundaries]
        return [
            ProbeValues(ends.rollout_id, level, level.clone())
            for ends, level in zip(boundaries, zeros, strict=True)
        ]


def _branches(
    template: Template, opening: str, answers: tuple[str, ...], inside: bool
) -> tuple[Branch, ...]:
    return tuple(template.render(opening, answer, inside) for answer in answers)


def _by_place(rollout: Rollout, boundaries: Boundaries) -> dict[bool, list[int]]:
    """Return the boundary numbers between messages (False) and in the middle of one (True)."""
    found: dict[bool, list[int]] = {}
    for k, end in enumerate(boundaries.prefix_ends):
        inside = int(rollout.kinds[end - 1]) == TokenKind.ACTION
        found.setdefault(inside, []).append(k)
    return found
