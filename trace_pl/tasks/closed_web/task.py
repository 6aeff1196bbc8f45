"""The built-in closed web as a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from trace_pl.tasks.closed_web.world import ClosedWeb
from trace_pl.tasks.protocol import Split, Task
from trace_pl.tools.browser import Browser, SeenWordsGuard
from trace_pl.tools.corpus import Corpus
from trace_pl.tools.index import Bm25Index
from trace_pl.tools.protocol import Toolbox
from trace_pl.types import Question


def web_browser(web: ClosedWeb) -> Browser:
    """Return the browser of a closed web: a name must be read before it is searched.

    Without that rule a policy learns to jump to the pages it remembers instead of searching.
    """
    corpus = Corpus(web.documents())
    return Browser(corpus, Bm25Index(corpus), guard=SeenWordsGuard())


class ClosedWebTask(Task):
    """Multi-hop questions over the web that the built-in base model knows.

    Args:
        hops: Hop counts to mix; the base model answers about 14 % of 2-hop, 3.5 % of 3-hop
            and 1.5 % of 4-hop questions when it has two turns for each hop and one to spare.
    """

    def __init__(self, hops: Sequence[int] = (3,)) -> None:
        """Choose the difficulty."""
        self.web = ClosedWeb()
        self.hops = tuple(hops)
        self._questions: dict[Split, list[Question]] = {
            split: self.web.questions(self.hops, split) for split in get_args(Split)
        }

    def questions(self, split: Split) -> list[Question]:
        """Return the questions of a split."""
        return list(self._questions[split])

    def toolbox(self) -> Toolbox:
        """Return the browser."""
        return web_browser(self.web)
