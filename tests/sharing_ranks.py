"""Two ranks that share questions: what each asked, and what each has after groups were dealt."""

import json
import os
import time
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore

from trace_pl.distributed.exchange import exchange
from trace_pl.distributed.leader import own_rank, to_all
from trace_pl.engines.transformers import HFEngine
from trace_pl.models.loading import load_tokenizer
from trace_pl.models.names import BUILT_IN_BASE, resolve_model
from trace_pl.privates import default_store
from trace_pl.rollout.agent import AgentLoop
from trace_pl.rollout.chat.answer_formats import AnswerTags
from trace_pl.rollout.chat.call_formats import HermesFormat
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.rollout.collector import Collector
from trace_pl.rollout.trajectory import AgentLimits
from trace_pl.tasks.closed_web.task import ClosedWebTask
from trace_pl.tasks.rewards import ExactMatchReward
from trace_pl.tools.protocol import Toolbox, ToolSession
from trace_pl.training.row_plan import deal_groups

GROUP_SIZE = 2
QUESTIONS = ClosedWebTask((2,)).questions("train")[:8]


class SlowToolbox(Toolbox):
    """Tools that answer when ``wait`` returns."""

    def __init__(self, tools):
        self.tools = tools
        self.wait = lambda: None

    def schemas(self):
        return self.tools.schemas()

    def session(self, question):
        return SlowSession(self.tools.session(question), self)


class SlowSession(ToolSession):
    """The calls of one rollout."""

    def __init__(self, session, toolbox):
        self.session = session
        self.toolbox = toolbox

    def call(self, call):
        self.toolbox.wait()
        return self.session.call(call)


def make_collector():
    """Return the built-in base on the closed web, one rollout at a time."""
    tools = SlowToolbox(ClosedWebTask((2,)).toolbox())
    template = ChatTemplate(
        load_tokenizer(BUILT_IN_BASE), tools.schemas(), answer_format=AnswerTags(instruction="")
    )
    engine = HFEngine(resolve_model(BUILT_IN_BASE), 1024, max_num_seqs=1, seed=0)
    limits = AgentLimits(3, 24, 600)
    loop = AgentLoop(engine, template, tools, HermesFormat(), ExactMatchReward(), limits)
    return tools, Collector(loop, 1.0)


def tokens(groups):
    """Return the tokens of every rollout by position of its question."""
    return {str(n): [r.token_ids.tolist() for r in group.rollouts] for n, group in groups.items()}


def wait_until_all_are_taken(number):
    """Wait until every question of a phase is asked by some rank."""
    taken = PrefixStore(f"questions-{number}", default_store())
    while taken.add("taken", 0) < len(QUESTIONS):
        time.sleep(0.01)


def main(output):
    """Share questions three times, with either rank slow and ahead of time; then lose a rank."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    tools, collector = make_collector()
    collector.loop.engine.version = 0
    phases = []
    for slow in (0, 1):
        if own_rank() == slow:
            tools.wait = lambda number=slow: wait_until_all_are_taken(number)
        sampled = collector.collect(QUESTIONS, GROUP_SIZE, "rollouts")
        phases.append([list(sampled), tokens(deal_groups(sampled)[0])])
        tools.wait = lambda: None
    collector.start(QUESTIONS, GROUP_SIZE)
    total = torch.ones(1)
    for _ in range(50):  # training meanwhile
        distributed.all_reduce(total)
    sampled = collector.finish()
    phases.append([list(sampled), tokens(deal_groups(sampled)[0])])
    enough = collector.collect(QUESTIONS, GROUP_SIZE, "rollouts", enough=3)
    parcels = [[f"from {own_rank()} to {rank}"] for rank in range(2)]
    found = to_all({"phases": phases, "enough": list(enough), "parcels": exchange(parcels)})
    distributed.barrier()
    store = default_store()
    left = [
        number for number in range(4) if PrefixStore(f"questions-{number}", store).check(["taken"])
    ]
    if own_rank() == 0:
        Path(output).write_text(json.dumps({"ranks": found, "left": left}))
    distributed.barrier()
    lose_a_rank(collector)


def lose_a_rank(collector):
    """End the second rank in the middle of a phase; the first has to end with an error."""
    if own_rank() == 1:
        collector.loop.rules = None  # its first response is an exception
    try:
        deal_groups(collector.collect(QUESTIONS, GROUP_SIZE, "rollouts"))
    except Exception as error:
        print(f"rank {own_rank()} ended: {type(error).__name__}", flush=True)
        os._exit(0)
    os._exit(7)
