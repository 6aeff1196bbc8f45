"""Tool-use transcripts over the closed web, clean or noisy, made by running the real tools.

They are the base model's only schooling in tool use. Noise decides how good that base is: it
follows wrong relations, opens wrong results and gives up early, so that reinforcement learning has
something to find. A transcript that gives up answers "none": a base that guessed names instead
would teach the policy to stop searching.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from trace_pl.rollout.chat.answer_formats import AnswerTags
from trace_pl.tasks.closed_web.world import Chain, ClosedWeb
from trace_pl.tools.browser import Browser, BrowserSession
from trace_pl.types import ToolCall

UNKNOWN = "none"
"""What the agent answers when it gives up; never a gold answer."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How often the demonstrator does the right thing, per decision."""

    right_relation: float = 1.0
    right_result: float = 1.0
    give_up: float = 0.0
    """Chance, before each tool call, to stop and answer "none"."""
    silent_answer: float = 0.3
    """Chance that a final answer comes without a thought, as the prober asks for it."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """A question and its (action, observation) pairs; the last observation is empty."""

    question: str
    turns: tuple[tuple[str, str], ...]
    probed_answer: str | None = None
    """The gold answer, when the walk was cut to state it before its time."""


def action_text(thought: str, call: ToolCall) -> str:
    """Render one tool turn in the Hermes format."""
    payload = json.dumps({"name": call.name, "arguments": dict(call.arguments)})
    return f"<think>\n{thought}\n</think>\n\n<tool_call>\n{payload}\n</tool_call>"


def answer_text(thought: str, answer: str) -> str:
    """Render a final answer."""
    return f"<think>\n{thought}\n</think>\n\n{AnswerTags().write(answer)}"


class Demonstrator:
    """Walks chains of one web with the real tools, making mistakes as ``noise`` says."""

    def __init__(self, web: ClosedWeb, browser: Browser) -> None:
        """Use ``browser`` over the documents of ``web``."""
        self.web = web
        self.browser = browser

    def transcript(self, chain: Chain, noise: Noise, rng: random.Random) -> Transcript:
        """Return one walk along ``chain``."""
        question = self.web.question(chain)
        session = self.browser.session(question)
        turns: list[tuple[str, str]] = []
        for action, call in self._walk(chain, noise, rng, session):
            turns.append((action, session.call(call).text if call else ""))
        return Transcript(question.text, tuple(turns))

    def probed_transcript(self, chain: Chain, noise: Noise, rng: random.Random) -> Transcript:
        """Return a walk that is cut at a random boundary and followed by the gold answer.

        From these the model learns what can be known of an answer before it was found, in the very
        words in which the prober asks.
        """
        walked = self.transcript(chain, noise, rng)
        turns = walked.turns[: rng.randrange(len(walked.turns))]
        gold = self.web.entities[chain.path[-1]].name
        return Transcript(walked.question, turns, gold)

    def _walk(
        self, chain: Chain, noise: Noise, rng: random.Random, session: BrowserSession
    ) -> Iterator[tuple[str, ToolCall | None]]:
        # Every thought ends by repeating the question from the entity at hand up to the next one.
        # Each decision then follows a word that its outcome followed before, in the question or on
        # a page, and continuing a word as before is the first thing that a small model learns.
        kinds = [f"a {self.web.entities[id_].kind}" for id_ in chain.path]
        steps = zip(kinds, chain.relations, kinds[1:], strict=False)
        clauses = [*(f"{kind} {rel} {target}" for kind, rel, target in steps), kinds[-1]]
        entity = self.web.entities[chain.path[0]]
        thought = f"{entity.name}, {clauses[0]}."
        for relation, clause in zip(chain.relations, clauses[1:], strict=True):
            if rng.random() < noise.give_up:
                yield answer_text("I do not know.", UNKNOWN), None
                return
            call = ToolCall("search", {"query": entity.name})
            yield action_text(thought, call), call
            titles = [self.web.entities[docid].name for docid in session.shown_results]
            if entity.name not in titles:
                yield answer_text("I do not know.", UNKNOWN), None
                return
            right = titles.index(entity.name) + 1
            wrong = [n for n in range(1, len(titles) + 1) if n != right]
            while wrong and rng.random() >= noise.right_result:
                number = wrong.pop(rng.randrange(len(wrong)))
                call = ToolCall("open", {"id": number})
                yield action_text(f"[{number}] {titles[number - 1]}.", call), call
            if rng.random() < noise.give_up:
                yield answer_text("I do not know.", UNKNOWN), None
                return
            call = ToolCall("open", {"id": right})
            yield action_text(f"[{right}] {entity.name}.", call), call
            facts = dict(entity.facts)
            taken = relation
            if rng.random() >= noise.right_relation:
                taken = rng.choice([r for r in facts if r != relation])
            fact = f"It is a {entity.kind} {taken}"
            entity = self.web.entities[facts[taken]]
            thought = f"{fact} {entity.name}, {clause}."
        silent = rng.random() < noise.silent_answer
        yield answer_text("" if silent else thought, entity.name), None
