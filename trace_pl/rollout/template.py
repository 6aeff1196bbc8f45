"""The pieces of a model's chat template that stand between sampled texts, found once.

A dialogue is never rendered again while it grows: templates drop earlier thinking, so a re-rendered
history is not what the policy sampled. Instead a few sentinel dialogues are rendered at the start,
cut at the sentinels, and the pieces are appended around whatever is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from trace_pl.errors import ConfigError
from trace_pl.rollout.encoding import TextEncoder
from trace_pl.scoring.protocol import Branch

# Letters only, so that no template trims, escapes or splits them.
_USER, _CALL, _RESULT = "zqUSERqz", "zqCALLqz", "zqRESULTqz"
_CALL_2, _RESULT_2 = "zqCALLTWOqz", "zqRESULTTWOqz"


class ChatTemplate:
    """Token pieces of one tokenizer's chat template with one set of tools.

    Args:
        tokenizer: a tokenizer that has a chat template.
        tools: JSON schemas of the tools, as the template describes them to the model.

    Raises:
        ConfigError: if there is no chat template, if it does not know tools or tool results, or if
            its pieces do not add up to what it renders itself.
    """

    generation_header: list[int]
    """Opens the assistant's turn, e.g. ``<|im_start|>assistant\\n``."""
    end_of_turn: int
    """The token that the policy samples to end its turn."""
    observation_open: list[int]
    """Between the end-of-turn token and the tool's text."""
    observation_close: list[int]
    """From the tool's text up to the next generation header."""
    thinking_open: bool
    """Whether the generation header itself opens the thinking block."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]] = ()
    ) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"Expected a chat template, got tokenizer '{tokenizer.name_or_path}' without one. "
                "Use an instruction-tuned model, or add a chat_template.jinja to its folder."
            )
        self._tokenizer = tokenizer
        # Templates test for None; the wider element type is what transformers accepts.
        self._tools: list[dict[Any, Any] | Callable[..., Any]] | None = list(tools) or None
        self._tool_names = [str(tool.get("function", tool).get("name")) for tool in tools]
        self._encoder = TextEncoder(tokenizer)
        self._prompts: dict[str, tuple[list[int], list[int]]] = {}
        self._find_pieces()
        self._check_tools()
        self._check_whole()

    @property
    def name(self) -> str:
        """Name or path of the tokenizer."""
        return str(self._tokenizer.name_or_path)

    # --- what the agent loop appends --------------------------------------------------------

    def prompt_ids(self, system: str, question: str) -> list[int]:
        """Return the prompt up to the user's end of turn, without a generation header.

        Args:
            system: instructions that go before the tools' description; may be empty.
            question: the user's text; chat markup in it stays plain text.
        """
        if system not in self._prompts:
            text = self._render([*_system(system), _message("user", _USER)])
            before, after = self._split(text, _USER)
            self._prompts[system] = (self.encode_markup(before), self.encode_markup(after))
        before_ids, after_ids = self._prompts[system]
        return [*before_ids, *self._encoder.plain(question), *after_ids]

    def observation_ids(self, text: str) -> list[int]:
        """Return a tool's text as tokens, none of which is markup."""
        return self._encoder.plain(text)

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
        ``opening``; in the middle of a message only the end of thinking and ``opening``. None of it
        is scored.

        Args:
            opening: text between the start of the assistant's message and the answer.
            answer: one accepted gold answer.
            inside: whether the prefix ends in the middle of the assistant's own thinking.

        Raises:
            CreditError: if the answer has no tokens.
        """
        opening_ids, answer_ids = self._encoder.split(opening, answer)
        if inside:
            head = self.encode_markup("\n</think>\n\n" if self._closed_thinking else "\n\n")
        else:
            head = [*self.generation_header, *self.encode_markup(self._closed_thinking)]
        return Branch((*head, *opening_ids), tuple(answer_ids))

    # --- construction -----------------------------------------------------------------------

    def _find_pieces(self) -> None:
        user = [_message("user", _USER)]
        dialogue = [*user, _message("assistant", _CALL), _message("tool", _RESULT)]
        prompt = self._render(user)
        header = self._after(prompt, self._render(user, generate=True))
        before, rest = self._split(self._render(dialogue), _CALL)
        between, close = self._split(rest, _RESULT)
        self._past_header = self._after(prompt, before)
        end_and_open = self.encode_markup(between)
        # The text ends where the model must stop by itself: at one special token.
        if not end_and_open or end_and_open[0] not in self._encoder.markup_ids:
            raise self._error(f"an end-of-turn token after the assistant's text, got {between!r}")
        self.end_of_turn, *self.observation_open = end_and_open
        self.observation_close = self.encode_markup(close)
        self.generation_header = self.encode_markup(header)
        self.thinking_open = header.rstrip().endswith("<think>")
        self._closed_thinking = ""
        if self.thinking_open:
            self._closed_thinking = "\n</think>\n\n"
        elif "think>" in str(self._tokenizer.chat_template) and "<think>" not in header:
            self._closed_thinking = "<think>\n\n</think>\n\n"

    def _check_tools(self) -> None:
        prompt = self._render([_message("user", _USER)])
        missing = [name for name in self._tool_names if name not in prompt]
        if missing:
            raise self._error(f"a template that describes tools; it leaves out {missing}")

    def _check_whole(self) -> None:
        """Rebuild a dialogue of two tool turns from the pieces and compare with the template."""
        # Earlier thinking is dropped by templates, so here turns start without it.
        past_header = self.encode_markup(self._past_header)
        built = self.prompt_ids("", _USER)
        messages = [_message("user", _USER)]
        for call, result in ((_CALL, _RESULT), (_CALL_2, _RESULT_2)):
            messages += [_message("assistant", call), _message("tool", result)]
            built += [*past_header, *self.encode_markup(call), self.end_of_turn]
            built += [*self.observation_open, *self.observation_ids(result)]
            built += self.observation_close
        built += self.generation_header
        found, expected = self.decode(built), self._render(messages, generate=True)
        if found != expected:
            at = next(
                (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b),
                min(len(found), len(expected)),
            )
            raise self._error(
                f"pieces that add up to {expected[max(0, at - 20) : at + 20]!r} at character {at}, "
                f"got {found[max(0, at - 20) : at + 20]!r}"
            )

    def _render(self, messages: list[dict[str, str]], generate: bool = False) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=self._tools,
                tokenize=False,
                add_generation_prompt=generate,
            )
        except (TemplateError, ValueError, TypeError) as error:
            roles = [message["role"] for message in messages]
            raise self._error(f"a dialogue of {roles} to be rendered, got '{error}'") from error
        return str(text)

    def _split(self, text: str, sentinel: str) -> tuple[str, str]:
        parts = text.split(sentinel)
        if len(parts) != 2:
            raise self._error(
                f"each message exactly once in the rendered dialogue, got {len(parts) - 1} times "
                f"{sentinel!r}"
            )
        return parts[0], parts[1]

    def _after(self, start: str, text: str) -> str:
        if not text.startswith(start):
            raise self._error("a prompt that stays as it is when the dialogue goes on")
        return text[len(start) :]

    def _error(self, expectation: str) -> ConfigError:
        return ConfigError(
            f"Expected from the chat template of '{self.name}' {expectation}. Use a model whose "
            "template supports roles `tool` and `assistant` with plain text, or edit the template."
        )


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _system(text: str) -> list[dict[str, str]]:
    return [_message("system", text)] if text else []
