from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from builders import rollout
from lookup_scorer import LetterTemplate

from callbacks import FixedTokenSegmenter, ReasoningSegmenter, ToolCallSegmenter
from trace_pl.credit.boundaries import tool_call_boundaries
from trace_pl.errors import ConfigError
from trace_pl.types import TokenKind

TEMPLATE = LetterTemplate()


def thinker(text):
    """Return a rollout without tools whose one message is ``text``, a token for each letter."""
    item = rollout(turns=[], final=len(text), prompt=3)
    ids = torch.tensor([*item.token_ids[: -len(text)].tolist(), *map(ord, text)])
    return replace(item, token_ids=ids)


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


def test_fixed_turns_hold_that_many_sampled_tokens():
    item = rollout(turns=[(5, 4), (3, 2)], final=4)
    ends = FixedTokenSegmenter(4).segment(item, TEMPLATE).prefix_ends
    assert ends[0] == item.prompt_length
    counts = [int(item.loss_mask[:end].sum()) for end in ends]
    assert counts == [0, 4, 8, 12]
    assert all(item.loss_mask[end - 1] for end in ends[1:])


def test_reasoning_is_cut_after_sentences_and_not_inside_numbers():
    item = thinker('Pi is 3.14 or so. Is it? "Yes." Now the rest.</think>Answer. It is 3.')
    assert pieces(ReasoningSegmenter("sentence", 1), item) == [
        "Pi is 3.14 or so.",
        " Is it?",
        ' "Yes."',
        " Now the rest.</think>Answer. It is 3.",
    ]


def test_paragraphs_end_with_their_blank_lines():
    item = thinker("One.\nStill one.\n\nTwo.\n \nThree.\n</think>\n\nx")
    assert pieces(ReasoningSegmenter("paragraph", 1), item) == [
        "One.\nStill one.\n\n",
        "Two.\n \n",
        "Three.\n</think>\n\nx",
    ]


def test_short_sentences_join_the_next():
    item = thinker("A. B. C. A longer one. End.</think>x")
    assert pieces(ReasoningSegmenter("sentence", 6), item)[0] == "A. B."


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
