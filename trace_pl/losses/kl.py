"""The optional penalty for leaving the frozen reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from trace_pl.errors import ConfigError

Estimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class KLPenalty:
    """An estimate of KL(policy || reference) on the sampled tokens, added to the loss.

    With x = log pi_ref - log pi (Schulman, "Approximating KL divergence"):

        k1 = -x                 unbiased, but its gradient as a loss is that of nothing: mean zero
        k2 = x^2 / 2            its gradient is that of the KL
        k3 = exp(x) - 1 - x     unbiased and never negative, as in GRPO

    Deviation: the paper uses weight 0.

    Args:
        weight: Factor of the penalty, above 0.
        estimator: One of the three.

    Raises:
        ConfigError: if the weight is not above 0 or the estimator unknown.
    """

    weight: float = 1e-3
    estimator: Estimator = "k3"

    def __post_init__(self) -> None:
        if not 0.0 < self.weight < float("inf") or self.estimator not in get_args(Estimator):
            raise ConfigError(
                f"Expected a weight above 0 and an estimator of {list(get_args(Estimator))} in "
                f"model.loss.init_args.kl, got {self.weight} and '{self.estimator}'. "
                "Leave `kl` out for no penalty."
            )

    def per_token(self, logprobs_BT: Tensor, reference_logprobs_BT: Tensor) -> Tensor:
        """Return the (B, T) estimate, before the weight, in nats."""
        x = reference_logprobs_BT - logprobs_BT
        if self.estimator == "k1":
            return -x
        if self.estimator == "k2":
            return x.square() / 2
        return x.expm1() - x
