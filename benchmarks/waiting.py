"""How long ranks wait for each other: questions dealt beforehand, or taken as there is room.

First a simulation: trajectories of log-normal length, a number of places in each rank's engine, a
token at a time in every place. Then two real ranks on this machine, vLLM and the built-in base on
the closed web, whose tools answer after times that are log-normal by question.

    python benchmarks/waiting.py
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import distributed, multiprocessing
from torch.distributed import HashStore  # type: ignore[attr-defined]

from trace_pl.distributed.leader import to_all
from trace_pl.distributed.question_queue import QuestionQueue
from trace_pl.engines.vllm.engine import VLLMEngine
from trace_pl.models.loading import load_tokenizer
from trace_pl.models.names import BUILT_IN_BASE, resolve_model
from trace_pl.rollout.agent import AgentLoop
from trace_pl.rollout.chat.answer_formats import AnswerTags
from trace_pl.rollout.chat.call_formats import HermesFormat
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.rollout.trajectory import AgentLimits
from trace_pl.tasks.closed_web.task import ClosedWebTask
from trace_pl.tasks.rewards import ExactMatchReward
from trace_pl.tools.protocol import Toolbox, ToolSession
from trace_pl.types import Question, RolloutGroup, ToolCall, ToolResult

SIGMA = 0.6
"""Of the logarithm of lengths: a trajectory in forty is more than three times the median."""


class SimulatedRank:
    """An engine with a number of places, each of which makes a token of one trajectory at a time.

    Args:
        lengths_QG: Tokens of each rollout of each question.
        queue: Gives the questions.
        places: Trajectories at the same time.
        most: Rollouts on their way beyond which no question is taken.
        speed: Tokens of a place in a unit of time.
    """

    def __init__(
        self,
        lengths_QG: Sequence[Sequence[float]],
        queue: QuestionQueue,
        places: int,
        most: int,
        speed: float,
    ) -> None:
        self.lengths_QG = lengths_QG
        self.queue = queue
        self.places = places
        self.most = most
        self.speed = speed
        self.now = 0.0
        self.useful_tokens = 0.0
        """Of groups that are complete and wanted."""
        self._ends: list[tuple[float, int]] = []
        self._waiting: list[tuple[float, int]] = []
        self._missing = [len(lengths) for lengths in lengths_QG]

    def fill(self) -> None:
        """Take questions while there is room, and start what a place is free for."""
        while len(self._ends) + len(self._waiting) < self.most:
            taken = self.queue.take()
            if taken is None:
                break
            self._waiting += [(length, taken) for length in self.lengths_QG[taken]]
        while self._waiting and len(self._ends) < self.places:
            length, question = self._waiting.pop(0)
            heapq.heappush(self._ends, (self.now + length / self.speed, question))

    @property
    def next_end(self) -> float:
        """When the next trajectory ends; never if there is none."""
        return self._ends[0][0] if self._ends else float("inf")

    def advance(self) -> None:
        """Go on to the next end."""
        self.now, question = heapq.heappop(self._ends)
        self._missing[question] -= 1
        if self._missing[question] == 0 and self.queue.count():
            self.useful_tokens += sum(self.lengths_QG[question])
        self.fill()


@dataclass(frozen=True)
class Way:
    """How questions come to ranks."""

    is_shared: bool = True
    extra: float = 0.0
    """Questions that are asked beyond those that are wanted, as a share of them."""
    is_sorted: bool = False
    """Whether the longest are asked first, which nobody can know."""


WAYS = {
    "static": Way(is_shared=False),
    "shared": Way(),
    "shared, 25 % extra": Way(extra=0.25),
    "longest first": Way(is_sorted=True),
}


def simulate(
    lengths: Sequence[Sequence[float]],
    wanted: int,
    way: Way,
    ranks: int,
    places: int,
    slowest: float,
) -> tuple[float, float, float]:
    """Return how full batches were while a rank worked, its wait at the end, and both together."""
    asked = list(lengths[: round(wanted * (1.0 + way.extra))])
    if way.is_sorted:
        asked.sort(key=max, reverse=True)
    store, workers = HashStore(), []
    for rank in range(ranks):
        queue = QuestionQueue(len(asked), store, ranks, wanted if way.extra else None)
        mine, most = asked, min(places, queue.fair_share * len(asked[0]))
        if not way.is_shared:
            mine = asked[rank::ranks]
            queue, most = QuestionQueue(len(mine)), len(mine) * len(mine[0])
        speed = slowest if rank == 0 else 1.0
        workers.append(SimulatedRank(mine, queue, places, most, speed))
    for worker in workers:
        worker.fill()
    while (worker := min(workers, key=lambda w: w.next_end)).next_end < float("inf"):
        worker.advance()
        if worker.queue.has_enough():
            for other in workers:
                other.now = worker.now
            break
    end = max(worker.now for worker in workers)
    full = fmean(w.useful_tokens / (places * w.speed * w.now) for w in workers)
    able = places * sum(worker.speed for worker in workers)
    used = sum(worker.useful_tokens for worker in workers) / (able * end)
    return full, 1.0 - fmean(worker.now for worker in workers) / end, used


def draw(draws: random.Random, questions: int, group_size: int) -> list[list[float]]:
    """Return log-normal lengths; half of their variance is the question's, half the rollout's."""
    part = SIGMA / 2**0.5
    means = [draws.gauss(0.0, part) for _ in range(questions)]
    return [[draws.lognormvariate(mean, part) for _ in range(group_size)] for mean in means]


def simulations(ranks: int, places: int, group_size: int, repeats: int) -> list[dict[str, Any]]:
    """Return occupancy and waiting for several numbers of questions per rank."""
    found = []
    for per_rank, slowest in ((4, 1.0), (8, 1.0), (16, 1.0), (32, 1.0), (8, 0.5), (32, 0.5)):
        case: dict[str, Any] = {"questions_per_rank": per_rank, "slowest": slowest}
        for name, way in WAYS.items():
            draws, wanted, runs = random.Random(0), per_rank * ranks, []
            for _ in range(repeats):
                lengths = draw(draws, 2 * wanted, group_size)
                runs.append(simulate(lengths, wanted, way, ranks, places, slowest))
            columns = [round(100 * fmean(column)) for column in zip(*runs, strict=True)]
            case[name] = dict(zip(("occupied", "waiting", "used"), columns, strict=True))
        found.append(case)
    return found


# --- two real ranks --------------------------------------------------------------------------


class SlowTools(Toolbox):
    """Tools that answer after a time that belongs to the question.

    Args:
        tools: The real ones.
        median_s: Median of the time.
    """

    def __init__(self, tools: Toolbox, median_s: float) -> None:
        self.tools = tools
        self.median_s = median_s

    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of the tools."""
        return self.tools.schemas()

    def session(self, question: Question, /) -> ToolSession:
        """Return tools for one rollout."""
        seconds = self.median_s * random.Random(question.id).lognormvariate(0.0, SIGMA)
        return SlowSession(self.tools.session(question), seconds)


@dataclass(frozen=True)
class SlowSession(ToolSession):
    """One rollout's slow tools."""

    session: ToolSession
    seconds: float

    def call(self, call: ToolCall, /) -> ToolResult:
        """Wait, then answer."""
        time.sleep(self.seconds)
        return self.session.call(call)


def measure(rank: int, port: int, places: int, questions: int, median_s: float, out: Any) -> None:  # noqa: ANN401  (a queue)
    """Be one of two ranks, with tools alike, then with those of the first three times as slow."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
        "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    task = ClosedWebTask(hops=[3])
    tools = SlowTools(task.toolbox(), median_s)
    template = ChatTemplate(
        load_tokenizer(BUILT_IN_BASE), tools.schemas(), answer_format=AnswerTags(instruction="")
    )
    engine = VLLMEngine(
        resolve_model(BUILT_IN_BASE), 1024, max_num_seqs=places, kv_cache_gib=0.2, seed=0,
        num_threads=1,
    )  # fmt: skip
    limits = AgentLimits(max_turns=8, max_response_tokens=64, max_trajectory_tokens=900)
    loop = AgentLoop(engine, template, tools, HermesFormat(), ExactMatchReward(), limits)
    asked = task.questions("train")[:questions]

    def static() -> list[RolloutGroup]:
        return loop.collect(asked[rank::2], 2)

    def shared() -> list[RolloutGroup]:
        queue = QuestionQueue.of_all_ranks(len(asked))
        groups = [group for _, group in loop.stream(asked, 2, queue=queue)]
        queue.close()
        return groups

    ways = {"static": static, "shared": shared}
    static()  # warms up engine and prefix cache
    found = {"alike": timed(ways)}
    tools.median_s = median_s * (3 if rank == 0 else 1)
    found["unlike"] = timed(ways)
    if rank == 0:
        out.put(found)
    distributed.barrier()


def timed(ways: Mapping[str, Callable[[], list[RolloutGroup]]]) -> dict[str, Any]:
    """Collect in all ways in turns, twice, and return the faster time of each."""
    found: dict[str, Any] = {}
    for name, collect in 2 * list(ways.items()):
        distributed.barrier()
        start = time.perf_counter()
        groups = collect()
        seconds = to_all(time.perf_counter() - start)
        rollouts = {r.id: r.token_ids.tolist() for group in groups for r in group.rollouts}
        run = {
            "seconds": [round(s, 2) for s in seconds],
            "waiting": round(1.0 - fmean(seconds) / max(seconds), 3),
            "rollouts": {k: v for each in to_all(rollouts) for k, v in each.items()},
        }
        found[name] = min(found.get(name, run), run, key=lambda each: max(each["seconds"]))
    same = found["static"].pop("rollouts") == found["shared"].pop("rollouts")
    return {**found, "same_rollouts": same}


def two_ranks(places: int, questions: int, median_s: float) -> dict[str, Any]:
    """Return what two ranks measured."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(measure, (port, places, questions, median_s, out), nprocs=2)
    found: dict[str, Any] = out.get()
    return found


def main() -> None:
    """Simulate, measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8, help="of the simulation")
    parser.add_argument("--places", type=int, default=16, help="sequences of an engine at a time")
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20, help="phases that are simulated")
    parser.add_argument("--questions", type=int, default=48, help="of two real ranks, two rollouts")
    parser.add_argument("--latency", type=float, default=0.2, help="median seconds of a real tool")
    sizes = parser.parse_args()
    simulated = simulations(sizes.ranks, sizes.places, sizes.group_size, sizes.repeats)
    real = two_ranks(4, sizes.questions, sizes.latency)
    alike = real["alike"]
    ratio = max(alike["static"]["seconds"]) / max(alike["shared"]["seconds"])
    print(
        json.dumps(
            {
                "name": "waiting",
                "ratio": round(ratio, 2),
                "simulated": simulated,
                "real": real,
                **vars(sizes),
            }
        )
    )


if __name__ == "__main__":
    main()
