import pytest
from agent_runs import run_one
from scripted import search

from trace_pl.training.rollout_metrics import rollout_statistics
from trace_pl.types import Question, ToolResult

FOUND = ToolResult("[1] Arden - a town.\n[2] Lund - a port.", docids=("d1", "d2"))
READ = ToolResult("Arden is a town.", docids=("d1",), opened=("d1",))


@pytest.mark.parametrize(
    ("results", "recall"), [([FOUND], 0.0), ([FOUND, READ, READ], 0.5), ([READ], 0.5)]
)
def test_evidence_is_found_once_a_result_shows_it_in_full_whatever_the_tool_is_called(
    results, recall
):
    question = Question("q", "Who?", ("Mira",), {"evidence": ["d1", "d2"]})
    shown = iter(results)
    rollout = run_one(
        [*[search("Arden")] * len(results), "I do not know."],
        questions=[question],
        tools=lambda *_: next(shown),
    )
    assert rollout_statistics([rollout])["evidence_recall"].tolist() == [recall]
