"""Two ranks that share their questions sample what one rank does, whoever is slow."""

import json

import pytest
import sharing_ranks
from processes import Ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    output = tmp_path_factory.mktemp("shared") / "found.json"
    ranks = Ranks(2, sharing_ranks.main, output)
    ranks.finish()
    for number, rank in enumerate(ranks.ranks):
        assert f"rank {number} ended" in rank.output()
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def alone():
    """Tokens of one rank, and of each question in a phase by itself."""
    _, collector = sharing_ranks.make_collector()
    collector.loop.engine.version = 0
    groups = collector.collect(sharing_ranks.QUESTIONS, sharing_ranks.GROUP_SIZE, "rollouts")
    dealt = {}
    for rank in range(2):
        found = collector.loop.collect(sharing_ranks.QUESTIONS[rank::2], sharing_ranks.GROUP_SIZE)
        dealt |= {str(rank + 2 * n): group for n, group in enumerate(found)}
    collector.close()
    return sharing_ranks.tokens(groups), sharing_ranks.tokens(dealt)


@pytest.mark.parametrize("phase", [0, 1, 2])
def test_the_rollouts_of_two_ranks_are_those_of_one_and_of_a_static_deal(found, alone, phase):
    one, static = alone
    asked, dealt = zip(*(rank["phases"][phase] for rank in found["ranks"]), strict=True)
    assert sorted([*asked[0], *asked[1]]) == list(range(8))
    assert dealt[0] | dealt[1] == one
    assert dict(sorted(static.items())) == one


def test_who_asks_depends_on_the_clock_and_who_has_a_group_afterwards_does_not(found):
    first, second = found["ranks"]
    counts = [[len(rank["phases"][n][0]) for rank in (first, second)] for n in range(2)]
    assert counts[0][0] < 4 < counts[0][1]  # the slow one asked what its engine had places for
    assert counts[1][0] > 4 > counts[1][1]
    for rank in (first, second):
        assert rank["phases"][0][1] == rank["phases"][1][1] == rank["phases"][2][1]


def test_enough_groups_are_enough_of_all_ranks_together(found):
    assert sum(len(rank["enough"]) for rank in found["ranks"]) == 3


def test_a_phase_leaves_nothing_in_the_store_and_parcels_go_where_they_should(found):
    assert found["left"] == []
    assert found["ranks"][0]["parcels"] == ["from 0 to 0", "from 1 to 0"]
    assert found["ranks"][1]["parcels"] == ["from 0 to 1", "from 1 to 1"]
