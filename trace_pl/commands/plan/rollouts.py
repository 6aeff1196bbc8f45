"""How many trajectories an engine samples at once, and what it reads twice.

All trajectories of an epoch are begun together, grow alike and wait for tools in turn. Between two
turns a trajectory's keys and values stay in the cache until another one needs the room. As long as
all fit side by side each token is read once. Beyond that the one that waits longest loses its room
first, and it is the next to come: every turn then reads its whole prefix again.
"""

from __future__ import annotations

from dataclasses import dataclass

from trace_pl.commands.plan.inputs import PlannedRun
from trace_pl.commands.plan.memory import cached_tokens


@dataclass(frozen=True)
class Turn:
    """One response of every trajectory of an engine, with what the tool before it returned."""

    prefix: float
    """Tokens before it."""
    length: float
    """Tokens of the trajectory halfway through it."""
    concurrent: float
    """Trajectories that are sampled at the same time."""
    is_evicted: bool
    """Whether the prefix has to be read again."""


def rollouts_of_one(run: PlannedRun) -> float:
    """Return the trajectories of an epoch that one engine samples."""
    gpus = run.engine.own_gpus or run.sharding.world
    return run.work.trajectories * run.engine.gpus_of_one / gpus


def turns_of(run: PlannedRun) -> list[Turn]:
    """Return the responses of a trajectory, evenly long, in order."""
    alive, cached = rollouts_of_one(run), cached_tokens(run)
    most = min(alive, run.engine.max_num_seqs)
    count = run.work.turns + 1
    turns = []
    for number in range(count):
        prefix = run.work.tokens * number / count
        length = prefix + run.work.tokens / count / 2
        concurrent = max(1.0, min(most, cached / length))
        turns.append(Turn(prefix, length, concurrent, is_evicted=alive * length > cached))
    return turns


def num_evicted(run: PlannedRun) -> int:
    """Return how often the prefix of a trajectory is read again."""
    return sum(turn.is_evicted for turn in turns_of(run))
