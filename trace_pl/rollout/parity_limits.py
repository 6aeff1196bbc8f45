"""How far apart engine and trainer may be after a push, which depends on how they round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch


class _Noise(NamedTuple):
    """What right engines of L layers differ by at most: a figure's factor times ``L ** power``."""

    mean: float
    high: float
    largest: float
    power: float
    safety: float
    """What the limits are a multiple by."""


# What `python benchmarks/parity_limits.py` fitted above all that it measured, in nats, rounded up.
# In float32 a wide model sums longer rows than those measured, which the margin is for; TF32 lies
# far beyond it. In half precision products are summed in float32 whatever the width, and trained
# models differ by a quarter of the random ones, which is most of the margin. A mixture in float32
# sends one token in tens of thousands to another expert: its figures are those of four at once,
# which is margin enough.
_MEASURED = {
    ("float32", False): _Noise(2.8e-6, 1.7e-5, 2.4e-5, power=0.43, safety=5.0),
    ("float32", True): _Noise(0.008, 0.055, 1.1, power=0.1, safety=1.0),
    ("half precision", False): _Noise(0.047, 0.24, 0.48, power=0.44, safety=1.2),
    ("half precision", True): _Noise(0.145, 2.1, 3.6, power=0.05, safety=1.2),
}

LARGEST, MEAN, HIGH = (f"weights/parity_{name}nats" for name in ("", "mean_", "p99_"))
"""Tags under which the three figures are logged."""


@dataclass(frozen=True, slots=True)
class ParityLimits:
    """How far apart two log-probs of the same token may be, in nats.

    In half precision a right engine may be a third of a nat off at one token in hundreds, so the
    largest difference says little there; mean and a high quantile hardly vary.
    """

    mean: float
    """Of the mean over tokens."""
    high: float
    """Of the 99th percentile."""
    largest: float
    """Of the largest difference."""
    is_largest_fatal: bool
    """Whether a run stops at the largest difference as well, or only warns."""
    reason: str
    """What the limits allow for."""

    @classmethod
    def derived(cls, dtypes: set[torch.dtype], num_layers: int, has_experts: bool) -> Self:
        """Return limits that follow from number formats and depth.

        A mixture of experts that rounds otherwise sends a few tokens to other experts, in float32
        as well, so that a few differences are large.

        Args:
            dtypes: number formats of both sides; the coarsest counts.
            num_layers: layers of the model (L).
            has_experts: whether a layer routes tokens to experts.
        """
        name = "float32" if dtypes <= {torch.float32, torch.float64} else "half precision"
        noise = _MEASURED[name, has_experts]
        scale = noise.safety * num_layers**noise.power
        return cls(
            scale * noise.mean,
            scale * noise.high,
            scale * noise.largest,
            is_largest_fatal=False,
            reason=f"{name} in {num_layers} layers{' with experts' if has_experts else ''}",
        )

    @classmethod
    def of_tolerance(cls, tolerance: float) -> Self:
        """Return the limit that a user set: no difference may be larger."""
        return cls(tolerance, tolerance, tolerance, True, "data.parity_tolerance")

    def by_tag(self) -> dict[str, float]:
        """Return the limits under the tags of what they limit."""
        return {LARGEST: self.largest, MEAN: self.mean, HIGH: self.high}
