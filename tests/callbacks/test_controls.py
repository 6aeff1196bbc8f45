from dataclasses import replace

import pytest
import torch
from builders import rollout

from callbacks import EvidenceProber
from trace_pl.credit.boundaries import tool_call_boundaries
from trace_pl.errors import ConfigError, CreditError
from trace_pl.types import Question, ToolResult

TWO_PAGES = Question("q7", "Who?", ("Ada",), {"evidence": ["p1", 2]})


def with_opened(*pages):
    """Return a rollout whose turns opened these pages."""
    plain = rollout(turns=[(2, 2)] * len(pages), of=TWO_PAGES)
    turns = [
        replace(turn, result=ToolResult("text", docids=opened, opened=opened))
        for turn, opened in zip(plain.turns, pages, strict=True)
    ]
    return replace(plain, turns=tuple(turns))


def test_the_evidence_prober_counts_the_right_pages_that_were_opened():
    opened = with_opened(("p1",), ("other",), ("p1", "2"))
    (values,) = EvidenceProber().probe([opened], [tool_call_boundaries(opened)], None, None)
    torch.testing.assert_close(values.values, torch.tensor([0.0, 0.75, 0.75, 1.5]))


def test_a_page_that_a_search_only_lists_is_not_opened():
    listed = rollout(turns=[(2, 2)], of=TWO_PAGES)
    turn = replace(listed.turns[0], result=ToolResult("list", docids=("p1",)))
    (values,) = EvidenceProber().probe(
        [replace(listed, turns=(turn,))], [tool_call_boundaries(listed)], None, None
    )
    assert values.values.tolist() == [0.0, 0.0]


def test_a_question_without_evidence_is_refused():
    plain = rollout()
    with pytest.raises(CreditError, match="evidence in question 'q0', got none"):
        EvidenceProber().probe([plain], [tool_call_boundaries(plain)], None, None)


@pytest.mark.parametrize("height", [0.0, float("inf")])
def test_a_height_that_orders_nothing_is_refused(height):
    with pytest.raises(ConfigError, match="height above 0"):
        EvidenceProber(height)
