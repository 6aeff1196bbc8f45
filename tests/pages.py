"""A small invented corpus, shared by the tests of search."""

from trace_pl.tools.browser import Browser
from trace_pl.tools.corpus import Corpus, Document
from trace_pl.tools.index import Bm25Index
from trace_pl.types import Question, ToolCall, ToolResult

TOWER = Document(
    "d1",
    "Arden Tower",
    "Arden Tower is a tower by the river. It was\nbuilt by Mira Holt in 1902.\n\n"
    "| part | height |\n---\n| spire | 12 m |",
)
HOLT = Document("d2", "Mira Holt", "Mira Holt was an architect. She was born in Lund.")
LUND = Document("d3", "Lund", "Lund is a town in the south. It has a harbour.")
OTHER = Document("d4", "Arden", "Arden is a town.")


def corpus() -> Corpus:
    """Return the four pages."""
    return Corpus([TOWER, HOLT, LUND, OTHER])


def browser(**settings: object) -> Browser:
    """Return a browser over the four pages."""
    pages = corpus()
    return Browser(pages, Bm25Index(pages), **settings)


class Caller:
    """Calls the tools of one session by keyword."""

    def __init__(self, browser_: Browser, question: str = "Who built Arden Tower?") -> None:
        self.session = browser_.session(Question("q", question, ("x",)))

    def __call__(self, name: str, **arguments: object) -> ToolResult:
        return self.session.call(ToolCall(name, arguments))
