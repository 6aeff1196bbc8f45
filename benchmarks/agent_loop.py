"""Rollouts whose tools answer after uneven times: each goes on by itself, or all wait each turn.

The built-in base model and real vLLM on the closed web, tools delayed by exponential latencies that
both ways draw alike. With a barrier the next responses are sampled when every tool has answered.

    python benchmarks/agent_loop.py --rollouts 64 --latency 0.5
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trace_pl.engines.vllm.engine import VLLMEngine
from trace_pl.models.loading import load_tokenizer
from trace_pl.models.names import BUILT_IN_BASE, resolve_model
from trace_pl.rollout import agent
from trace_pl.rollout.agent import AgentLoop
from trace_pl.rollout.chat.call_formats import HermesFormat
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.rollout.phase import RolloutPhase
from trace_pl.rollout.trajectory import AgentLimits
from trace_pl.tasks.closed_web.task import ClosedWebTask
from trace_pl.tasks.rewards import ExactMatchReward
from trace_pl.tools.protocol import Toolbox, ToolSession
from trace_pl.types import Question, Rollout, ToolCall, ToolResult


@dataclass(frozen=True)
class SlowTools(Toolbox):
    """Tools that answer after exponential times, the same for the same question and turn."""

    tools: Toolbox
    latency_s: float

    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of the tools."""
        return self.tools.schemas()

    def session(self, question: Question, /) -> ToolSession:
        """Return tools for one rollout."""
        draws = random.Random(question.text)
        return SlowSession(self.tools.session(question), self.latency_s, draws)


@dataclass(frozen=True)
class SlowSession(ToolSession):
    """One rollout's slow tools."""

    session: ToolSession
    latency_s: float
    draws: random.Random

    def call(self, call: ToolCall, /) -> ToolResult:
        """Wait, then answer."""
        time.sleep(self.draws.expovariate(1.0 / self.latency_s))
        return self.session.call(call)


class BarrierPhase(RolloutPhase):
    """Samples all responses, then waits for all tools, and so on."""

    def advance(self) -> list[tuple[int, Rollout]]:
        """Sample every response that is due, then take in every tool's result."""
        while self._generating:
            for completion in self.engine.step():
                self._on_completion(completion)
        outcomes = []
        while len(outcomes) < len(self._acting):
            outcomes += self.tools.poll(0.05)
        for outcome in outcomes:
            self._on_tool(outcome)
        while self._grading:
            for graded in self.grader.poll(0.05):
                self._on_grade(graded)
        ended, self._ended = self._ended, []
        return ended


def timed(collect: Callable[[], list[Rollout]]) -> tuple[float, list[Rollout]]:
    """Return seconds and rollouts."""
    start = time.perf_counter()
    rollouts = collect()
    return time.perf_counter() - start, rollouts


def main() -> None:
    """Collect both ways and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--latency", type=float, default=0.5, help="mean seconds of a tool call")
    sizes = parser.parse_args()
    task = ClosedWebTask(hops=[3])
    tools = SlowTools(task.toolbox(), sizes.latency)
    template = ChatTemplate(load_tokenizer(BUILT_IN_BASE), tools.schemas())
    engine = VLLMEngine(resolve_model(BUILT_IN_BASE), 1024, seed=0, num_threads=1)
    limits = AgentLimits(max_turns=8, max_response_tokens=64, max_trajectory_tokens=900)
    loop = AgentLoop(
        engine, template, tools, HermesFormat(), ExactMatchReward(), limits,
        num_threads=sizes.rollouts,
    )  # fmt: skip
    questions = task.questions("train")[: sizes.rollouts]

    def collect() -> list[Rollout]:
        return [rollout for group in loop.collect(questions, 1) for rollout in group.rollouts]

    timed(collect)  # warms up engine and prefix cache for both
    free_s, free = timed(collect)
    agent.RolloutPhase = BarrierPhase  # type: ignore[misc]
    barrier_s, barrier = timed(collect)
    engine.close()
    same = [
        a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(free, barrier, strict=True)
    ]
    print(
        json.dumps(
            {
                "name": "agent_loop",
                "ratio": round(barrier_s / free_s, 2),
                "same_rollouts": round(sum(same) / len(same), 3),
                "turns": [min(r.num_turns for r in free), max(r.num_turns for r in free)],
                **vars(sizes),
            }
        )
    )


if __name__ == "__main__":
    main()
