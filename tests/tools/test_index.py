import multiprocessing
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import bm25_oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import corpus

from trace_pl.errors import ConfigError
from trace_pl.tasks.closed_web.world import ClosedWeb
from trace_pl.tools.analysis import analyse
from trace_pl.tools.corpus import Corpus, Document
from trace_pl.tools.index import Bm25Index, Hit

PAGES = Bm25Index(corpus())


def docids(hits):
    """Return the docids of hits."""
    return [hit.docid for hit in hits]


def test_scores_and_order_equal_a_plain_bm25_on_random_ragged_documents():
    rng = random.Random(0)
    words = [f"w{n}" for n in range(30)]

    def text(longest):
        return " ".join(rng.choices(words, k=rng.randint(1, longest)))

    random_corpus = Corpus(Document(f"d{n}", text(4), text(40)) for n in range(80))
    index = Bm25Index(random_corpus)
    for _ in range(40):
        query = text(6)
        expected = bm25_oracle.rank(random_corpus, query)
        hits = index.search(query, 10)
        best = [score for _, score in expected[:10]]
        assert [hit.score for hit in hits] == pytest.approx(best, rel=1e-5)
        assert dict(expected) == pytest.approx(
            dict(expected) | {hit.docid: hit.score for hit in hits}, rel=1e-5
        )


def test_a_hand_computed_score():
    """Two documents of titles 'x', 'y' and texts of one term: tf and length factors are 1.

    The term stands in one of two documents: ln(1 + (2 - 1 + 0.5) / (1 + 0.5)) = ln 2, and the
    other factor is (1.2 + 1) * 1 / (1 + 1.2) = 1.
    """
    index = Bm25Index(Corpus([Document("a", "x", "red"), Document("b", "y", "blue")]))
    (hit,) = index.search("red", 5)
    assert hit == Hit("a", pytest.approx(0.6931472, abs=1e-6))


def test_title_and_text_are_both_searched():
    assert docids(PAGES.search("Lund", 3)) == ["d3", "d2"]
    assert docids(PAGES.search("harbour", 3)) == ["d3"]


def test_equal_scores_are_ordered_by_docid_also_across_the_cut():
    twins = [Document(f"{n:02d}", "Twin", "the same words") for n in range(30)]
    random.Random(1).shuffle(twins)
    assert docids(Bm25Index(Corpus(twins)).search("same", 4)) == ["00", "01", "02", "03"]


@pytest.mark.parametrize(
    ("query", "terms"),
    [
        ("The Rivers' towers", ["the", "river", "tower"]),
        ("Cafe\u0301 Z\u00dcRICH", ["cafe", "zurich"]),
        ("\u5317\u4eac2008", ["\u5317", "\u4eac", "2008"]),
        ('AND (title:"-', ["and", "titl"]),
        ("?!\u2014", []),
        ("x" * 65, []),
    ],
)
def test_text_is_analysed_to_these_terms(query, terms):
    assert analyse(query) == terms


@pytest.mark.parametrize(
    "query", ["", "(", '"', "a:b", "-", "AND OR NOT", "[1 TO", "\ud800", "\x00"]
)
def test_query_syntax_means_nothing(query):
    assert isinstance(PAGES.search(query, 3), list)


@given(st.text(st.characters()))
def test_any_unicode_query_gives_a_list_of_known_documents(query):
    assert set(docids(PAGES.search(query, 3))) <= {"d1", "d2", "d3", "d4"}


def test_a_limit_below_one_is_refused():
    with pytest.raises(ConfigError, match="limit of at least 1"):
        PAGES.search("Lund", 0)


def test_a_pickled_index_answers_alike_in_a_spawned_process():
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(PAGES.search, ("Arden tower", 3)) == PAGES.search("Arden tower", 3)


def test_threads_that_open_one_index_together_get_the_same_hits():
    copy = pickle.loads(pickle.dumps(PAGES))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: copy.search("Arden", 3), range(32)))
    assert found == [PAGES.search("Arden", 3)] * 32


def test_every_page_of_the_closed_web_is_found_by_its_own_name_mostly_first():
    """A page that names a whole family may outrank one whose name is part of its own."""
    web = Corpus(ClosedWeb().documents())
    index = Bm25Index(web)
    ranks = [
        [hit.docid for hit in index.search(document.title, 3)].index(id_)
        for id_, document in web.items()
    ]
    assert ranks.count(0) / len(ranks) > 0.98
