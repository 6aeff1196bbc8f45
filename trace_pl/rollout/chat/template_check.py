"""Proof at the start that what the agent loop appends is what the chat template renders."""

from __future__ import annotations

from trace_pl.errors import ConfigError
from trace_pl.rollout.chat.template import ChatTemplate

_QUESTION = "zqUSERqz?"
_TURNS = (
    # Ends that tokenizers like to merge with what follows, and edges that templates like to trim.
    ("zqONEqz", "zqPAGEqz one."),
    ("zqTWOqz", ' "zqPAGEqz" (two)\n'),
    ("zqTHREEqz", "\n{zqPAGEqz: three} "),
)
_THOUGHT = "zqTHOUGHTqz"


def check_template(template: ChatTemplate) -> None:
    """Build a dialogue of three tool turns from the pieces and compare it with the template's own.

    If the template keeps thinking within a question, responses with thinking are compared. If it
    drops earlier thinking, responses without: the record keeps what was sampled, so there only the
    text around it can agree.

    Raises:
        ConfigError: names the tokenizer and the first token that differs.
    """
    is_kept = template.knows_thinking and _keeps_thinking(template)
    if is_kept:
        _compare(template, has_thinking=True)
    if not (is_kept and template.thinking_open):
        _compare(template, has_thinking=False)


def _keeps_thinking(template: ChatTemplate) -> bool:
    return template.rendered(_dialogue(template, True), generate=True).count(_THOUGHT) == 3


def _dialogue(template: ChatTemplate, has_thinking: bool) -> list[dict[str, str]]:
    messages = template.opening("", _QUESTION)
    thinking = f"<think>\n{_THOUGHT}\n</think>\n\n" if has_thinking else ""
    for call, result in _TURNS:
        messages += [
            {"role": "assistant", "content": thinking + call},
            {"role": "tool", "content": result},
        ]
    return messages


def _compare(template: ChatTemplate, has_thinking: bool) -> None:
    header, thinking = template.generation_header, ""
    if has_thinking:
        thinking = f"{_THOUGHT}\n</think>\n\n"
        if not template.thinking_open:
            thinking = "<think>\n" + thinking
    elif template.thinking_open:  # earlier responses are shown without what opens their thinking
        text = template.decode(header).rstrip().removesuffix("<think>")
        header = template.encode_markup(text)
    built = template.prompt_ids("", _QUESTION)
    for call, result in _TURNS:
        built += [*header, *template.encode_markup(thinking + call), template.end_of_turn]
        built += [*template.observation_open, *template.observation_ids(result)]
        built += template.observation_close
    built += template.generation_header
    own = template.rendered(_dialogue(template, has_thinking), generate=True)
    expected = template.encode_markup(own)
    if template.slots_apart:  # taught with other tokens at the edges, but with the same text
        built = template.encode_markup(template.decode(built))
    if built != expected:
        raise _difference(template, expected, built)


def _difference(template: ChatTemplate, expected: list[int], built: list[int]) -> ConfigError:
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, built, strict=False)) if a != b),
        min(len(expected), len(built)),
    )

    def shown(ids: list[int]) -> str:
        return f"{ids[at]} ({template.decode(ids[at : at + 1])!r})" if at < len(ids) else "its end"

    return template.error(
        "that a dialogue of three tool turns is made of equal pieces: token "
        f"{at} is {shown(expected)} in its own rendering, got {shown(built)} from the pieces, "
        f"after {template.decode(expected[max(0, at - 8) : at])!r}"
    )
