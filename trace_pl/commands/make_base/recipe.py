"""The settings of `trace-pl make-base`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BaseRecipe:
    """Everything the base model depends on; the same recipe gives the same model on one machine."""

    seed: int = 0
    num_webs: int = 60
    """Webs of fresh names and links, beside the real one."""
    num_transcripts: int = 9_000
    permuted_share: float = 0.75
    """Share of the transcripts that walk one of the fresh webs."""
    right_relation: float = 0.8
    right_result: float = 0.6
    give_up: float = 0.12
    probed_share: float = 0.4
    """Share of the transcripts that end with the gold answer before it was found."""
    read_weight: float = 0.05
    """Loss weight of tokens that the agent did not write: their names are mostly chance."""
    probed_weight: float = 10.0
    """Loss weight of the tokens of a probed answer, which are few and hard."""
    batch_size: int = 8
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    vocab_size: int = 1280
    num_threads: int = 2
    """Part of the recipe: the order of float sums depends on it."""
