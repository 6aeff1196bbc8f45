"""Controls of an experiment: credit that knows more than it could, and credit spoilt on purpose.

What trains as well with spoilt credit owes nothing to turn-level credit; what perfect credit does
not improve, no prober can.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from callbacks.backups import KStepTD
from trace_pl.credit.stages import Backup, Prober, Reader
from trace_pl.errors import ConfigError, CreditError
from trace_pl.probes import Scorer, Template
from trace_pl.types import Boundaries, ProbeValues, Rollout, TurnCredit


class EvidenceProber(Prober):
    """Knows which pages hold the answer: the best that any prober could say of search.

        V_k = height * share of the question's evidence pages that were opened before boundary k

    It reads no model. Questions have to name their evidence (``meta["evidence"]``), as those of the
    closed web do.

    Args:
        height: value of having opened all evidence, in nats; above 0.

    Raises:
        ConfigError: if the height is not a positive number.
    """

    reader: ClassVar[Reader] = "none"

    def __init__(self, height: float = 1.5) -> None:
        if not 0.0 < height < math.inf:
            raise ConfigError(
                f"Expected a height above 0, got {height}. Change "
                "`credit.prober.init_args.height`; 1.5 is about what TRACE's own values reach."
            )
        self.height = height

    def probe(
        self,
        rollouts: Sequence[Rollout],
        boundaries: Sequence[Boundaries],
        scorer: Scorer,
        template: Template,
    ) -> list[ProbeValues]:
        """Return the values of all boundaries; see ``Prober.probe``.

        Raises:
            CreditError: if a question names no evidence.
        """
        return [self._values(r, ends) for r, ends in zip(rollouts, boundaries, strict=True)]

    def _values(self, rollout: Rollout, boundaries: Boundaries) -> ProbeValues:
        evidence = set(rollout.question.evidence)
        if not evidence:
            raise CreditError(
                f"Expected the docids of its evidence in question '{rollout.question.id}', got "
                "none. EvidenceProber is for questions that name them; use another prober."
            )
        shares = []
        for end in boundaries.prefix_ends:
            before = [turn for turn in rollout.turns if turn.observation_stop <= end]
            opened = {docid for turn in before for docid in turn.result.opened}
            shares.append(len(evidence & opened) / len(evidence))
        values = self.height * torch.tensor(shares)
        return ProbeValues(rollout.id, torch.zeros(len(values)), values)


class Control(Backup):
    """A backup whose credit is spoilt after another one has made it.

    Args:
        backup: makes the credit; :class:`callbacks.KStepTD` when None.
    """

    def __init__(self, backup: Backup | None = None) -> None:
        self.made_by: Backup = backup or KStepTD()

    @abstractmethod
    def spoil(self, credit: Tensor) -> Tensor:
        """Return what is made of the (N,) credit of one rollout."""

    def backup(self, values: ProbeValues) -> TurnCredit:
        """Return the spoilt credit."""
        made = self.made_by.backup(values)
        return TurnCredit(made.rollout_id, self.spoil(made.credit), made.num_steps, made.discount)


class ShuffledCredit(Control):
    """Deals the credit of a rollout to its turns at random.

    Magnitudes, signs and sums stay; only the claim "this turn earned it" is taken away.
    """

    def spoil(self, credit: Tensor) -> Tensor:
        """Return the credit in an order drawn from torch's random state."""
        return credit[torch.randperm(len(credit))]


class FlippedCredit(Control):
    """Blames what was credited and credits what was blamed."""

    def spoil(self, credit: Tensor) -> Tensor:
        """Return the credit with its sign changed."""
        return -credit


class NoisyCredit(Control):
    """Adds noise of a given strength, which makes credit of any quality out of a perfect one.

    Args:
        backup: makes the credit; :class:`callbacks.KStepTD` when None.
        noise: standard deviation of the normal noise on the credit of each turn, in nats.

    Raises:
        ConfigError: if the noise is negative or not finite.
    """

    def __init__(self, backup: Backup | None = None, noise: float = 1.0) -> None:
        super().__init__(backup)
        if not 0.0 <= noise < math.inf:
            raise ConfigError(
                f"Expected a noise of at least 0 nats, got {noise}. Change "
                "`credit.backup.init_args.noise`."
            )
        self.noise = noise

    def spoil(self, credit: Tensor) -> Tensor:
        """Return the credit plus noise drawn from torch's random state."""
        return credit + self.noise * torch.randn(len(credit))
