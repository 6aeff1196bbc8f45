import re

import pytest

from trace_pl.errors import ConfigError
from trace_pl.tasks.closed_web.world import KINDS, SPLIT_SHARES, ClosedWeb

WEB = ClosedWeb()


def test_the_same_seed_gives_the_same_web_and_another_seed_another():
    assert ClosedWeb(seed=3).documents() == ClosedWeb(seed=3).documents()
    assert ClosedWeb(seed=3).documents() != ClosedWeb(seed=4).documents()


def test_names_are_unique():
    names = [entity.name for entity in WEB.entities.values()]
    assert len(set(names)) == len(names) == 5 * 162


@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_splits_are_disjoint_and_cover_all_chains(hops):
    splits = [{q.id for q in WEB.questions((hops,), split)} for split in SPLIT_SHARES]
    assert sum(map(len, splits)) == len(set.union(*splits))
    assert len(set.union(*splits)) == (len(KINDS) - hops) * 162 * 3**hops


def test_walking_the_pages_gives_the_gold_answer():
    texts = {entity.name: WEB.page_text(entity) for entity in WEB.entities.values()}
    for question in WEB.questions((2, 3), "test")[:50]:
        name, chain = question.text.split(" is a ", 1)
        for relation in re.findall(r"\w+ing", chain):
            found = re.search(rf"{relation} ([A-Z]\w+(?: [A-Z]\w+)+)", texts[name])
            assert found is not None
            name = found[1]
        assert (name,) == question.answers


def test_evidence_pages_are_the_pages_along_the_chain_and_the_answer_stands_on_the_last():
    for question in WEB.questions((3,), "validation")[:20]:
        evidence = [WEB.entities[id_] for id_ in question.meta["evidence"]]
        assert len(evidence) == 3
        assert evidence[0].name in question.text
        assert question.answers[0] in WEB.page_text(evidence[-1])
        assert question.answers[0] not in WEB.page_text(evidence[0])


def test_each_page_of_the_evidence_adds_one_word_of_the_answer_and_the_last_all():
    for question in WEB.questions((4,), "validation")[:50]:
        _, *family = question.answers[0].split()
        for known, id_ in enumerate(question.meta["evidence"]):
            name = WEB.entities[id_].name.split()
            # The words of its family end every name along the chain; a town has none.
            assert name[1:] == family[-known:] if known else not set(name) & set(family)
        assert len(family) == 4


def test_the_relation_does_not_tell_the_family():
    """Else a question could be answered in part before any page was read."""
    towns = [e for e in WEB.entities.values() if e.kind == "town"]
    families = {(rel, WEB.entities[id_].name.split()[-1]) for e in towns for rel, id_ in e.facts}
    assert len(families) == 9


@pytest.mark.parametrize("size", [0, 3])
def test_a_family_size_that_names_can_not_carry_is_refused(size):
    with pytest.raises(ConfigError, match="last_family_size"):
        ClosedWeb(last_family_size=size)


def test_an_unknown_split_or_too_many_hops_is_refused():
    with pytest.raises(ConfigError, match="1 to 4 hops"):
        WEB.chains(5, "train")
    with pytest.raises(ConfigError, match="split"):
        WEB.chains(2, "dev")
