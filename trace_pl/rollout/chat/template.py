"""The pieces of a model's chat template that stand between sampled texts, found once.

A dialogue is never rendered again while it grows: templates drop earlier thinking, so a re-rendered
history is not what the policy sampled. Instead a few sentinel dialogues are rendered at the start,
cut at the sentinels, and the pieces are appended around whatever is sampled. Whether that gives the
template's own tokens is checked on a dialogue of three turns, see ``template_check``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from trace_pl.errors import ConfigError
from trace_pl.probes import Branch
from trace_pl.rollout.chat.answer_formats import AnswerFormat, AnswerTags
from trace_pl.rollout.chat.text_encoder import Slot, TextEncoder

logger = logging.getLogger(__name__)

# Letters only, so that no template trims, escapes or splits them.
_USER, _CALL, _RESULT = "zqUSERqz", "zqCALLqz", "zqRESULTqz"


class ChatTemplate:
    """Token pieces of one tokenizer's chat template with one set of tools and one answer format.

    Args:
        tokenizer: a tokenizer that has a chat template.
        tools: JSON schemas of the tools, as the template describes them to the model.
        tool_prompt: describes the tools in the system prompt, if the template does not.
        end_ids: tokens that end a text by the model's own settings, see ``policy.load_end_ids``.
        answer_format: how a final answer is stated; its instruction belongs to the system prompt.
            None means tags of which the prompt says nothing.

    Raises:
        ConfigError: if there is no chat template, if nothing describes the tools, if the template
            cannot show tool results.
    """

    generation_header: list[int]
    """Opens the assistant's turn, e.g. ``<|im_start|>assistant\\n``."""
    end_of_turn: int
    """The token that ends the assistant's turn in a rendered dialogue."""
    stop_ids: tuple[int, ...]
    """Every token that ends a response when the policy samples it: ``end_of_turn``, the tokenizer's
    end of a sequence, and the model's own. The only place that says what a sampler stops at."""
    observation_open: list[int]
    """Between the end-of-turn token and the observation: up to the last markup before it."""
    observation_close: list[int]
    """From the first markup after the observation up to the next generation header."""
    thinking_open: bool
    """Whether the generation header itself opens the thinking block."""
    tools: tuple[dict[str, Any], ...]
    """JSON schemas of the tools."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[dict[str, Any]] = (),
        tool_prompt: str = "",
        end_ids: Collection[int] = (),
        answer_format: AnswerFormat | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"Expected a chat template, got tokenizer '{tokenizer.name_or_path}' without one. "
                "Use an instruction-tuned model, or add a chat_template.jinja to its folder."
            )
        self._tokenizer = tokenizer
        self.tools = tuple(tools)
        # Templates test for None; the wider element type is what transformers accepts.
        self._tools: list[dict[Any, Any] | Callable[..., Any]] | None = list(tools) or None
        self._tool_names = [str(tool.get("function", tool).get("name")) for tool in tools]
        self._encoder = TextEncoder(tokenizer)
        self.slots_apart = self._encoder.slots_apart
        self._prompts: dict[str, Slot] = {}
        self.answer_format = answer_format or AnswerTags(instruction="")
        # Not yet: an instruction that happens to name a tool does not describe it.
        self._instruction = self._tool_prompt = ""
        self._describe_tools(tool_prompt)
        self._instruction = self.answer_format.instruction
        self._find_pieces()
        self.stop_ids = self._stop_ids(end_ids)

    @property
    def name(self) -> str:
        """Name or path of the tokenizer."""
        return str(self._tokenizer.name_or_path)

    @property
    def describes_tools(self) -> bool:
        """Whether the template itself tells the model how to call; else ``tool_prompt`` does."""
        return not self._tool_prompt

    @property
    def answer_opening(self) -> str:
        """What the policy writes before a final answer."""
        return self.answer_format.opening

    # --- what the agent loop appends --------------------------------------------------------

    def prompt_ids(self, system: str, question: str) -> list[int]:
        """Return the prompt up to the user's end of turn, without a generation header.

        Args:
            system: instructions that go before those on the answer and before the tools'
                description; may be empty.
            question: the user's text; chat markup in it stays plain text.
        """
        if system not in self._prompts:
            before, after = self.split(self.rendered(self.opening(system, _USER)), _USER)
            self._prompts[system] = self._encoder.slot(before, after)
        slot = self._prompts[system]
        return [*slot.open, *slot.fill(question), *slot.close]

    def opening(self, system: str, question: str) -> list[dict[str, str]]:
        """Return the messages before the first response."""
        parts = (system, self._instruction, self._tool_prompt)
        system = "\n\n".join(part for part in parts if part)
        first = [message("system", system)] if system else []
        return [*first, message("user", question)]

    def observation_ids(self, text: str) -> list[int]:
        """Return a tool's text as tokens, none of which is markup.

        The text around it up to the nearest markup belongs to them, for tokens may reach across;
        see ``Slot``.
        """
        return self._observation.fill(_quoted(text) if self._is_quoted else text)

    def encode_markup(self, text: str) -> list[int]:
        """Return trusted text as tokens; markup in it becomes its own tokens."""
        return self._encoder.markup(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self._encoder.decode(ids)

    # --- what the prober appends ------------------------------------------------------------

    def render(self, opening: str, answer: str, inside: bool = False) -> Branch:
        """Return the tokens that state ``answer`` after the words ``opening``.

        Deviation: the paper does not say what stands between a prefix and the gold answer. Here it
        is the generation header, an empty thinking block if the template knows thinking, and
        ``opening``; in the middle of thinking only the end of it and ``opening``. None of it is
        scored.

        Args:
            opening: text between the start of the assistant's message and the answer.
            answer: one accepted gold answer.
            inside: whether the prefix ends in the middle of the assistant's own thinking.

        Raises:
            CreditError: if the answer has no tokens.
        """
        opening_ids, answer_ids = self._encoder.split(opening, answer)
        if inside:
            head = self.encode_markup("\n</think>\n\n")
        else:
            head = [*self.generation_header, *self.encode_markup(self._closed_thinking)]
        return Branch((*head, *opening_ids), tuple(answer_ids))

    # --- construction -----------------------------------------------------------------------

    def _describe_tools(self, tool_prompt: str) -> None:
        """Put the tools into the system prompt if the template does not show them."""
        prompt = self.rendered(self.opening("", _USER))
        missing = [name for name in self._tool_names if name not in prompt]
        if any(name not in tool_prompt for name in missing):
            raise self.error(
                f"a description of the tools; it leaves out {missing}, and there is no "
                "`tool_prompt` that names them"
            )
        if missing:
            self._tool_prompt = tool_prompt
            logger.warning(
                "The chat template of '%s' does not describe tools: the system prompt does.",
                self.name,
            )

    def _find_pieces(self) -> None:
        opening = self.opening("", _USER)
        prompt, generating = self.rendered(opening), self.rendered(opening, generate=True)
        if not generating.startswith(prompt):
            raise self.error("a prompt that stays as it is when a response is asked for")
        header = generating[len(prompt) :]
        dialogue = self.rendered([*opening, message("assistant", _CALL), message("tool", _RESULT)])
        # Some templates show a result as a JSON string.
        self._is_quoted = _quoted(_RESULT) in dialogue
        _, rest = self.split(dialogue, _CALL)
        between, close = self.split(rest, _quoted(_RESULT) if self._is_quoted else _RESULT)
        first = self.encode_markup(between)[:1]
        # The text ends where the model must stop by itself: at one special token.
        if not self._encoder.markup_ids.issuperset(first) or not first:
            raise self.error(f"an end-of-turn token after the assistant's text, got {between!r}")
        (self.end_of_turn,) = first
        open_ = between.lstrip().removeprefix(self.decode(first))
        self._observation = self._encoder.slot(open_, close)
        self.observation_open = self._observation.open
        self.observation_close = self._observation.close
        self.generation_header = self.encode_markup(header)
        self.thinking_open = header.rstrip().endswith("<think>")
        self.knows_thinking = "think>" in str(self._tokenizer.chat_template)
        self._closed_thinking = ""
        if self.thinking_open:
            self._closed_thinking = "\n</think>\n\n"
        elif self.knows_thinking and "<think>" not in header:
            self._closed_thinking = "<think>\n\n</think>\n\n"

    def _stop_ids(self, end_ids: Collection[int]) -> tuple[int, ...]:
        """Return what ends a response; words do not, whatever a model's settings say."""
        ids = {*end_ids, self._tokenizer.eos_token_id} - {None, self.end_of_turn}
        words = sorted(ids - self._encoder.markup_ids)
        if words:
            logger.warning(
                "The settings of '%s' end a text at the ids %s, which are no special tokens of its "
                "tokenizer: they end no response. Correct eos_token_id in its files.",
                self.name,
                words,
            )
        return tuple(sorted({self.end_of_turn, *ids} - set(words)))

    def rendered(self, messages: Sequence[dict[str, Any]], generate: bool = False) -> str:
        """Return the text that the template itself makes of a dialogue.

        Args:
            messages: the dialogue.
            generate: whether a generation header follows.

        Raises:
            ConfigError: if the template refuses the dialogue.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=self._tools,
                tokenize=False,
                add_generation_prompt=generate,
            )
        except (TemplateError, ValueError, TypeError) as error:
            roles = [message["role"] for message in messages]
            raise self.error(f"a dialogue of {roles} to be rendered, got '{error}'") from error
        return str(text)

    def split(self, text: str, sentinel: str) -> tuple[str, str]:
        """Return what stands before and after a sentinel.

        Raises:
            ConfigError: if it is not there exactly once.
        """
        parts = text.split(sentinel)
        if len(parts) != 2:
            raise self.error(
                f"each message exactly once in the rendered dialogue, got {len(parts) - 1} times "
                f"{sentinel!r}"
            )
        return parts[0], parts[1]

    def error(self, expectation: str) -> ConfigError:
        """Return an error that names the tokenizer."""
        return ConfigError(
            f"Expected from the chat template of '{self.name}' {expectation}. Use a model whose "
            "template supports roles `tool` and `assistant` with plain text, or edit the template."
        )


def message(role: str, content: str) -> dict[str, str]:
    """Return one message of a dialogue."""
    return {"role": role, "content": content}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
