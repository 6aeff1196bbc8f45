"""Runs of the agent loop with a scripted engine, shared by its tests."""

from conftest import make_tokenizer
from scripted import SCHEMA, FunctionTools, ScriptedEngine

from trace_pl.rollout.agent import AgentLoop
from trace_pl.rollout.chat.call_formats import HermesFormat
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.rollout.trajectory import AgentLimits
from trace_pl.tasks.rewards import ExactMatchReward
from trace_pl.tools.protocol import Toolbox
from trace_pl.types import Question, ToolResult

ENDOFTEXT = 0  # ends a text by the model's own settings, beside the template's <|im_end|>
TEMPLATE = ChatTemplate(make_tokenizer(), [SCHEMA], end_ids=[ENDOFTEXT])
ANSWER = "<answer>Mira Holt</answer>"
LIMITS = AgentLimits(max_turns=5, max_response_tokens=200, max_trajectory_tokens=2000)


def question(id_="q1", text="Who built the tower?"):
    return Question(id_, text, ("Mira Holt",))


def page(question, call, number):
    return ToolResult(f"page {number} on {call.arguments['query']}", docids=(f"d{number}",))


def make_loop(script, tools=page, limits=LIMITS, reward=None, **engine_settings):
    """Return a scripted engine and an agent loop on it, with a function or a toolbox as tools."""
    engine = ScriptedEngine(TEMPLATE, script, **engine_settings)
    reward = reward or ExactMatchReward()
    toolbox = tools if isinstance(tools, Toolbox) else FunctionTools(tools)
    return engine, AgentLoop(engine, TEMPLATE, toolbox, HermesFormat(), reward, limits)


def run(
    script,
    tools=page,
    limits=LIMITS,
    questions=None,
    group_size=1,
    reward=None,
    **engine_settings,
):
    """Run a script and return the loop's engine and groups."""
    engine, loop = make_loop(script, tools, limits, reward, **engine_settings)
    return engine, loop.collect(questions or [question()], group_size)


def run_one(script, **settings):
    """Run one rollout."""
    _, groups = run({"*": script}, **settings)
    return groups[0].rollouts[0]


def text_of(rollout, start, stop):
    return TEMPLATE.decode(rollout.token_ids[start:stop].tolist())


def prompt_length():
    return len(TEMPLATE.prompt_ids("", question().text))
