"""Okapi BM25 written down as slowly and plainly as possible."""

import math
from collections import Counter

from trace_pl.tools.analysis import analyse
from trace_pl.tools.corpus import Corpus

K1, B = 1.2, 0.75


def rank(corpus: Corpus, query: str) -> list[tuple[str, float]]:
    """Return (docid, score) of every document that holds a term of the query, best first."""
    scores: Counter[str] = Counter()
    for field in ("title", "text"):
        bags = {id_: Counter(analyse(getattr(doc, field))) for id_, doc in corpus.items()}
        mean_length = sum(bag.total() for bag in bags.values()) / len(bags)
        for term in set(analyse(query)):
            holders = [id_ for id_, bag in bags.items() if term in bag]
            rarity = math.log(1 + (len(bags) - len(holders) + 0.5) / (len(holders) + 0.5))
            for id_ in holders:
                count, length = bags[id_][term], bags[id_].total()
                norm = K1 * (1 - B + B * length / mean_length)
                scores[id_] += rarity * (K1 + 1) * count / (count + norm)
    return sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))
