from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from agent_runs import ANSWER, run_one
from agent_runs import TEMPLATE as CHAT
from builders import rollout
from lookup_scorer import LetterTemplate
from scripted import search

from callbacks import FixedTokenSegmenter, ReasoningSegmenter, ToolCallSegmenter
from trace_pl.credit.boundaries import tool_call_boundaries
from trace_pl.errors import ConfigError
from trace_pl.types import TokenKind

TEMPLATE = LetterTemplate()


def thinker(text, header="a"):
    """Return a rollout without tools whose one message is ``text``, a token for each letter."""
    item = rollout(turns=[], final=len(text), prompt=3)
    kinds = [*[TokenKind.PROMPT] * 3, *[TokenKind.TEMPLATE] * len(header)]
    kinds += [TokenKind.ACTION] * len(text)
    return replace(
        item,
        token_ids=torch.tensor([5, 5, 5, *map(ord, header + text)]),
        kinds=torch.tensor(kinds, dtype=torch.uint8),
        logprobs=torch.zeros(len(kinds)),
    )


def pieces(segmenter, item):
    """Return the texts between boundaries, and what follows the last."""
    ends = (*segmenter.segment(item, TEMPLATE).prefix_ends, len(item.token_ids))
    return [
        TEMPLATE.decode(
            [
                int(item.token_ids[i])
                for i in range(start, stop)
                if item.kinds[i] == TokenKind.ACTION
            ]
        )
        for start, stop in pairwise(ends)
    ]


def test_fixed_turns_hold_that_many_sampled_tokens_of_thinking():
    item = thinker("<think>abcdefghij</think>abcdefghij")
    assert pieces(FixedTokenSegmenter(4), item) == [
        "<think>a", "bcde", "fghi", "j</think>abcdefghij",
    ]  # fmt: skip


def test_a_fixed_turn_that_fills_up_outside_of_thinking_ends_with_the_next_observation():
    item = rollout(turns=[(5, 4), (3, 2), (9, 1)], final=20)
    ends = FixedTokenSegmenter(6).segment(item, TEMPLATE).prefix_ends
    assert ends == (item.prompt_length, *(turn.observation_stop for turn in item.turns[1:]))


SEGMENTERS = [FixedTokenSegmenter(1), ReasoningSegmenter("sentence", 1)]


@pytest.mark.parametrize("segmenter", SEGMENTERS)
@pytest.mark.parametrize(
    "text",
    [
        "It is so. And so. <answer>x</answer>",
        "</think>It is so. And so.",
        "I say <think>It is so. And so.</think>",
        "<think></think>It is so. And so.",
        "<think>.",
    ],
)
def test_nothing_is_cut_outside_of_thinking(segmenter, text):
    assert pieces(segmenter, thinker(text)) == [text]


@pytest.mark.parametrize("segmenter", SEGMENTERS)
def test_thinking_that_the_header_opened_is_cut_too(segmenter):
    item = thinker("A. B</think>C. D.", header="<think>\n")
    assert pieces(segmenter, item)[-1] in (" B</think>C. D.", "</think>C. D.")
    assert len(pieces(segmenter, item)) > 1


@pytest.mark.parametrize("segmenter", SEGMENTERS)
def test_thinking_that_was_cut_by_its_limit_is_cut_up_to_its_last_token(segmenter):
    found = pieces(segmenter, thinker("<think>A. B. C. "))
    assert "".join(found) == "<think>A. B. C. "
    assert found[-1] == " "


@pytest.mark.parametrize("segmenter", SEGMENTERS)
def test_every_end_in_a_real_message_is_inside_thinking_and_its_probe_is_well_formed(segmenter):
    thought = "<think>\nIt is in Arden. So I look. </think>\n\n"
    item = run_one(
        [thought + search("One. Two. Three."), "No. <think>" + search("A. B."), thought + ANSWER]
    )
    ends = segmenter.segment(item, CHAT).prefix_ends
    observations = [turn.observation_stop for turn in item.turns]
    starts = [item.prompt_length, *observations]
    inside = [end for end in ends[1:] if end not in observations]
    assert set(observations) <= set(ends)
    # Only the first and the last message think.
    assert {sum(end > start for start in starts) for end in inside} == {1, 3}
    branch = CHAT.render("<answer>", "Mira Holt", inside=True)
    for end in inside:
        start = max(start for start in starts if start < end)
        asked = CHAT.decode([*item.token_ids[start:end].tolist(), *branch.opening_ids])
        assert asked.count("<think>") == asked.count("</think>") == 1
        assert asked.endswith("\n</think>\n\n<answer>")


def test_reasoning_is_cut_after_sentences_and_not_inside_numbers():
    item = thinker('<think>Pi is 3.14 or so. Is it? "Yes." Now the rest.</think>Answer. It is 3.')
    assert pieces(ReasoningSegmenter("sentence", 1), item) == [
        "<think>Pi is 3.14 or so.",
        " Is it?",
        ' "Yes."',
        " Now the rest.</think>Answer. It is 3.",
    ]


def test_paragraphs_end_with_their_blank_lines():
    item = thinker("<think>One.\nStill one.\n\nTwo.\n \nThree.\n</think>\n\nx")
    assert pieces(ReasoningSegmenter("paragraph", 1), item) == [
        "<think>One.\nStill one.\n\n",
        "Two.\n \n",
        "Three.\n</think>\n\nx",
    ]


def test_short_sentences_join_the_next():
    item = thinker("<think>A. B. C. A longer one. End.</think>x")
    assert pieces(ReasoningSegmenter("sentence", 14), item)[0] == "<think>A. B. C."


def test_observations_end_turns_too():
    item = rollout(turns=[(3, 2), (4, 1)], final=2)
    tools = tool_call_boundaries(item)
    assert ToolCallSegmenter().segment(item, TEMPLATE) == tools
    assert ReasoningSegmenter().segment(item, TEMPLATE) == tools


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FixedTokenSegmenter(0), "num_tokens of at least 1"),
        (lambda: ReasoningSegmenter(min_tokens=0), "min_tokens of at least 1"),
        (lambda: ReasoningSegmenter(unit="word"), "'sentence', 'paragraph'"),
    ],
)
def test_impossible_settings_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
