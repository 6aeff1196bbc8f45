"""The browser a policy sees: search, open, find."""

from __future__ import annotations

from typing import Any

from trace_pl.errors import ConfigError
from trace_pl.text import clean_text
from trace_pl.tools import display
from trace_pl.tools.arguments import FIND, OPEN, SEARCH, TOOLS, ArgumentError
from trace_pl.tools.corpus import Corpus, Document
from trace_pl.tools.guards import AllowAll, QueryGuard, SeenWordsGuard
from trace_pl.tools.index import SearchIndex
from trace_pl.tools.protocol import Toolbox, ToolSession
from trace_pl.types import Question, ToolCall, ToolResult

__all__ = ["AllowAll", "Browser", "BrowserSession", "QueryGuard", "SeenWordsGuard"]

_PREFIX = "browser."


class Browser(Toolbox):
    """Makes sessions over one corpus; shared by all rollouts and never changed by them.

    Args:
        corpus: The pages.
        index: Ranks them.
        guard: Which queries are allowed; None allows all.
        num_results: Results a search shows.
        snippet_words: Words of a result's title, and of its snippet, at most.
        max_words: Words of a page, or of all passages found in it, shown by one call at most.
        num_passages: Passages a ``find`` shows at most.

    Raises:
        ConfigError: if a number is below 1.
    """

    def __init__(
        self,
        corpus: Corpus,
        index: SearchIndex,
        guard: QueryGuard | None = None,
        *,
        num_results: int = 3,
        snippet_words: int = 30,
        max_words: int = 600,
        num_passages: int = 5,
    ) -> None:
        for name, value in (
            ("num_results", num_results),
            ("snippet_words", snippet_words),
            ("max_words", max_words),
            ("num_passages", num_passages),
        ):
            if value < 1:
                raise ConfigError(f"Expected {name} of at least 1 for the browser, got {value}.")
        self.corpus = corpus
        self.index = index
        self.guard: QueryGuard = guard or AllowAll()
        self.num_results = num_results
        self.snippet_words = snippet_words
        self.max_words = max_words
        self.num_passages = num_passages

    def schemas(self) -> list[dict[str, Any]]:
        """Return the function schemas of the three tools, as chat templates take them."""
        return [tool.schema() for tool in TOOLS.values()]

    def session(self, question: Question) -> BrowserSession:
        """Return the state of a new rollout over ``question``."""
        return BrowserSession(self, question.text)


class BrowserSession(ToolSession):
    """What one rollout has searched and opened; the same calls always give the same results.

    Args:
        browser: Corpus, index and limits.
        question: The question of the rollout, which counts as read.
    """

    def __init__(self, browser: Browser, question: str) -> None:
        self._browser = browser
        self._read = [question]
        self._seen: set[str] = set()
        self._page: tuple[Document, display.FindablePage] | None = None
        self.shown_results: tuple[str, ...] = ()
        """Docids of the newest result list; result n is ``shown_results[n - 1]``."""

    def call(self, call: ToolCall) -> ToolResult:
        """Run one call.

        Every mistake of the policy is answered with a text that says what to do, and a kind:
        ``unknown_tool``, or ``arguments`` for a call that does not fit the tool or the moment. Only
        a failing index raises.

        Args:
            call: The call; ``search`` and ``browser.search`` name the same tool.

        Returns:
            The text for the policy, free of chat markup, and the docids it shows.
        """
        tool = TOOLS.get(call.name.removeprefix(_PREFIX))
        if tool is None:
            known = ", ".join(known.signature for known in TOOLS.values())
            message = f"unknown tool '{call.name[:40]}'. Tools: {known}."
            return _failure("unknown_tool", message)
        actions = {SEARCH: self._search, OPEN: self._open, FIND: self._find}
        try:
            text, docids = actions[tool](tool.value(call.arguments))
        except ArgumentError as error:
            return _failure("arguments", str(error))
        # Errors repeat what the policy wrote, so they do not count as read.
        self._read.append(text)
        opened = docids if tool is OPEN else ()
        return ToolResult(display.neutralise(text), docids=docids, opened=opened)

    def _search(self, query: str) -> tuple[str, tuple[str, ...]]:
        browser = self._browser
        objection = browser.guard.objection(query, self._read, browser.corpus)
        if objection is not None:
            raise ArgumentError(objection)
        hits = browser.index.search(query, browser.num_results)
        documents = [browser.corpus[hit.docid] for hit in hits]
        self.shown_results = tuple(document.id for document in documents)
        self._seen.update(self.shown_results)
        lines = [
            f"[{number}] {display.one_line(document.title, browser.snippet_words)} - "
            f"{display.first_sentence(document.text, browser.snippet_words)}"
            for number, document in enumerate(documents, start=1)
        ]
        return "\n".join(lines) or "No results.", self.shown_results

    def _open(self, id_: str) -> tuple[str, tuple[str, ...]]:
        browser = self._browser
        document = browser.corpus[self._chosen(id_)]
        text = document.text.strip()
        self._page = document, display.FindablePage(text)
        title = display.one_line(document.title, browser.snippet_words)
        return display.page(title, text, browser.max_words), (document.id,)

    def _chosen(self, id_: str) -> str:
        """Return the docid that an id means: a number of the newest list first, then a docid."""
        numbers = {str(n): docid for n, docid in enumerate(self.shown_results, start=1)}
        docid = numbers.get(id_.removesuffix(".0"), id_)
        if docid in self._seen:
            return docid
        if not self.shown_results:
            raise ArgumentError("nothing to open; search first.")
        raise ArgumentError(
            f"no result {id_[:40]}; the newest results are 1 to {len(self.shown_results)}."
        )

    def _find(self, pattern: str) -> tuple[str, tuple[str, ...]]:
        if self._page is None:
            raise ArgumentError("no page is open.")
        document, page = self._page
        limit = self._browser.num_passages
        matches = page.find(pattern, limit, max(1, self._browser.max_words // limit))
        if not matches.passages:
            return "No match.", ()
        more = [f"[{matches.remaining} more]"] if matches.remaining else []
        return "\n".join([*matches.passages, *more]), (document.id,)


def _failure(kind: str, message: str) -> ToolResult:
    text = display.neutralise(clean_text(f"Error: {message}"))
    return ToolResult(text, error=kind)
