"""Turn credit from the environment itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from trace_pl.credit.stages import Prober, Reader
from trace_pl.probes import Scorer, Template
from trace_pl.types import Boundaries, ProbeValues, Rollout


class EnvironmentProber(Prober):
    """Takes for the value of a boundary what the environment has paid until then.

    The place of process rewards (as MT-GRPO's, or a game's points) beside TRACE: with one-step
    backup the credit of a turn is the ``score`` of its result. No model is read.
    """

    reader: ClassVar[Reader] = "none"

    def probe(
        self,
        rollouts: Sequence[Rollout],
        boundaries: Sequence[Boundaries],
        scorer: Scorer,
        template: Template,
    ) -> list[ProbeValues]:
        """Return the summed scores of the turns that end by each boundary; see ``Prober.probe``."""
        return [_values(rollout, ends) for rollout, ends in zip(rollouts, boundaries, strict=True)]


def _values(rollout: Rollout, boundaries: Boundaries) -> ProbeValues:
    paid = [
        sum(t.result.score or 0.0 for t in rollout.turns if t.observation_stop <= end)
        for end in boundaries.prefix_ends
    ]
    values = torch.tensor(paid, dtype=torch.float32)
    return ProbeValues(rollout.id, torch.zeros(len(values)), values)
