"""Which queries a rollout may make."""

from __future__ import annotations

import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence

from trace_pl.tools.analysis import analyse
from trace_pl.tools.corpus import Corpus


class QueryGuard(ABC):
    """Decides about a query before it is searched. One guard serves all rollouts: no state."""

    @abstractmethod
    def objection(self, query: str, read: Sequence[str], corpus: Corpus) -> str | None:
        """Return why the query is refused, or None to let it pass.

        Args:
            query: What the policy wants to search.
            read: What this rollout has read: the question, then every result that was no error.
            corpus: What would be searched.
        """


class AllowAll(QueryGuard):
    """Lets every query pass."""

    def objection(self, query: str, read: Sequence[str], corpus: Corpus) -> str | None:
        """Return None."""
        return None


class SeenWordsGuard(QueryGuard):
    """A name must have been read before it is searched.

    Without this a policy trained on a small closed corpus learns to jump to the pages it remembers.
    A word is a name if it is capitalised, or if it stands in a title of the corpus however it is
    written; words compare as search terms, so neither case nor an ending gets around it.
    """

    def objection(self, query: str, read: Sequence[str], corpus: Corpus) -> str | None:
        """Return a refusal if the query holds a name that was not read."""
        seen = {term for text in read for term in analyse(text)}
        for word in re.findall(r"\w+", unicodedata.normalize("NFKC", query)):
            terms = set(analyse(word))
            is_name = word[0].isupper() or not terms.isdisjoint(corpus.title_terms)
            if is_name and not terms <= seen:
                return "search for a name you have read."
        return None
