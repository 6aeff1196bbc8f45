"""A scripted engine and small tools: real classes that stand in for a policy and a browser."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trace_pl.engines.protocol import Completion, GenerationRequest, RolloutEngine
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.tools.protocol import Toolbox, ToolSession
from trace_pl.types import Question, ToolCall, ToolResult

SCHEMA = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


def search(query: str) -> str:
    """The text of a response that searches."""
    return f'<tool_call>\n{{"name": "search", "arguments": {{"query": "{query}"}}}}\n</tool_call>'


class ScriptedEngine(RolloutEngine):
    """Replays texts: ``script["q1/0"]`` are the responses of rollout 0 of question q1, in order.

    ``"*"`` holds those of all other rollouts. Every step finishes all waiting requests but those
    that ``is_held`` names, newest first, so that nothing can depend on the order. A text ends with
    the template's end of turn, unless it is written with another stop token at its end.
    """

    def __init__(
        self,
        template: ChatTemplate,
        script: Mapping[str, Sequence[str]],
        max_model_len: int = 4096,
        is_held: Callable[[str, int], bool] = lambda rollout, step: False,
    ) -> None:
        self.template = template
        self.script = script
        self.max_model_len = max_model_len
        self.is_held = is_held
        self.version = 7
        self.requests: list[GenerationRequest] = []
        self.num_steps = 0
        self._waiting: list[GenerationRequest] = []

    def submit(self, request: GenerationRequest) -> None:
        assert request.max_tokens >= 1
        assert len(request.prompt_ids) + request.max_tokens <= self.max_model_len
        self.requests.append(request)
        self._waiting.append(request)

    def step(self) -> list[Completion]:
        self.num_steps += 1
        held = [r for r in self._waiting if self.is_held(rollout_name(r), self.num_steps)]
        ready = [r for r in self._waiting if r not in held]
        self._waiting = held
        return [self._complete(request) for request in reversed(ready)]

    def _complete(self, request: GenerationRequest) -> Completion:
        name, number = rollout_name(request), int(request.stream.split("/")[-1]) - 1
        text = self.script.get(name, self.script.get("*", ()))[number]
        ids = self.template.encode_markup(text)
        if not ids or ids[-1] not in request.stop_token_ids:
            ids.append(self.template.end_of_turn)
        is_cut = len(ids) > request.max_tokens
        ids = ids[: request.max_tokens]
        logprobs = tuple(-0.01 * (i + 1) for i in range(len(ids)))
        reason = "length" if is_cut else "stop"
        return Completion(request.request_id, tuple(ids), logprobs, reason)

    def has_unfinished(self) -> bool:
        return bool(self._waiting)

    def cancel(self, request_ids: Collection[str]) -> None:
        self._waiting = [r for r in self._waiting if r.request_id not in request_ids]

    def push_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.version = version

    def prompt_logprobs(self, token_ids: Sequence[int]) -> Tensor:
        return torch.full((len(token_ids) - 1,), -1.0)

    def close(self) -> None:
        self._waiting.clear()


def rollout_name(request: GenerationRequest) -> str:
    """Question id and rollout index of a request."""
    _, question, _, index, _ = request.stream.split("/")
    return f"{question}/{index}"


class FunctionTools(Toolbox):
    """A toolbox whose only tool is a function of (question, call, number of calls before)."""

    def __init__(self, function: Callable[[str, ToolCall, int], ToolResult]) -> None:
        self.function = function

    def schemas(self) -> list[dict[str, Any]]:
        return [SCHEMA]

    def session(self, question: Question) -> "FunctionSession":
        return FunctionSession(self.function, question.text)


class FunctionSession(ToolSession):
    """The calls of one rollout."""

    def __init__(self, function: Callable[[str, ToolCall, int], ToolResult], question: str) -> None:
        self.function = function
        self.question = question
        self.num_calls = 0

    def call(self, call: ToolCall) -> ToolResult:
        self.num_calls += 1
        return self.function(self.question, call, self.num_calls - 1)
