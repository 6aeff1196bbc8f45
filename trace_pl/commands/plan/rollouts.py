"""How many trajectories an engine samples at once, and what it reads twice.

All trajectories of an epoch are begun together and grow alike; tools are taken to need no time. The
cache gives room to the oldest first. As long as all fit side by side each token is read once. Then
the youngest wait, with what they have lost their keys and values to, until an older one has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from trace_pl.commands.plan.inputs import PlannedRun
from trace_pl.commands.plan.memory import cached_tokens


@dataclass(frozen=True)
class Round:
    """One response of each of the trajectories that fit, sampled at the same time."""

    concurrent: int
    """Trajectories."""
    tokens: float
    """Their tokens together, halfway through."""


def rollouts_of_one(run: PlannedRun) -> float:
    """Return the trajectories of an epoch that one engine samples."""
    gpus = run.engine.own_gpus or run.sharding.world
    return run.work.trajectories * run.engine.gpus_of_one / gpus


def rounds_of(run: PlannedRun) -> list[Round]:
    """Return how an engine samples its trajectories, whose responses are all equally long."""
    num_turns = run.work.turns + 1
    step, room = run.work.tokens / num_turns, cached_tokens(run)
    taken = [0] * max(1, round(rollouts_of_one(run)))
    """Responses of each unfinished trajectory so far, the oldest first."""
    rounds = []
    while taken:
        concurrent, used = 0, 0.0
        for turns in taken[: run.engine.max_num_seqs]:
            used += step * (turns + 1)
            if concurrent and used > room:
                break
            concurrent += 1
        running = taken[:concurrent]
        rounds.append(Round(concurrent, step * (sum(running) + concurrent / 2)))
        done = [turns + 1 for turns in running]
        taken = [turns for turns in done if turns < num_turns] + taken[concurrent:]
    return rounds


def reads_twice(run: PlannedRun) -> bool:
    """Return whether trajectories lose their room in the cache.

    Over a phase vLLM then reads about as many tokens again as there are, whatever the sizes.
    """
    return rollouts_of_one(run) * run.work.tokens > cached_tokens(run)
