import random
import statistics
from difflib import SequenceMatcher

import pytest
import torch
from builders import group, rollout

from callbacks import GiGPOAnchor
from trace_pl.credit.boundaries import tool_call_boundaries
from trace_pl.credit.gigpo import (
    SimilarStates,
    gigpo_step_advantages,
    observed_states,
)
from trace_pl.credit.outcomes import CentredOutcome, centred_rewards
from trace_pl.errors import ConfigError
from trace_pl.types import TokenKind, TurnCredit


def test_turns_from_one_state_are_compared_and_lone_turns_get_nothing():
    """Both start alike; the second rollout then sees a page that nobody else saw."""
    advantages = gigpo_step_advantages(
        [["start", "page"], ["start", "other"]], torch.tensor([1.0, 0.0]), discount=0.5
    )
    assert [row.tolist() for row in advantages] == [[1.0, 0.0], [-1.0, 0.0]]


def test_a_detour_is_worth_less_than_the_straight_way_from_the_same_state():
    """Q is gamma to the turns left: .25 and .5 from 'page' in one rollout, .5 in the other."""
    detour, straight = gigpo_step_advantages(
        [["start", "page", "page"], ["start", "page"]], torch.tensor([1.0, 1.0]), discount=0.5
    )
    values = [0.25, 0.5, 0.5]
    mean, deviation = statistics.fmean(values), statistics.pstdev(values)
    expected = [(value - mean) / deviation for value in values]
    assert detour.tolist() == pytest.approx([-1.0, expected[0], expected[1]], abs=1e-6)
    assert straight.tolist() == pytest.approx([1.0, expected[2]], abs=1e-6)


@pytest.mark.parametrize(
    ("threshold", "parts"),
    # 9 of 10 tokens in order are 2 * 9 / 20 = .9 of both; 8 of 10 are .8.
    [(1.0, [[0, 4], [1], [2], [3]]), (0.9, [[0, 1, 4], [2], [3]]), (0.8, [[0, 1, 2, 4], [3]])],
)
def test_states_are_similar_by_the_share_of_tokens_that_they_have_in_common(threshold, parts):
    states = ["abcdefghij", "abcdefghiX", "abcdXXghij", "jihgfedcba", "abcdefghij"]
    assert SimilarStates(threshold).clusters(states) == parts


def test_a_state_joins_the_first_part_whose_first_state_it_resembles():
    # The third resembles the second and not the first; the second has joined the first already.
    states = ["abcdefghij", "abcdefghiX", "abcdefghXX"]
    assert SimilarStates(0.9).clusters(states) == [[0, 1], [2]]


def test_empty_states_are_similar_to_each_other_alone():
    assert SimilarStates(0.9).clusters([]) == []
    assert SimilarStates(0.9).clusters(["", "a", ""]) == [[0, 2], [1]]


@pytest.mark.parametrize("seed", range(2))
def test_similar_states_agree_with_plain_ratios_on_long_random_pages(seed):
    rng = random.Random(seed)
    pages = [[rng.randrange(20) for _ in range(300)] for _ in range(3)]
    states = []
    for _ in range(20):
        page = list(rng.choice(pages))
        for _ in range(rng.choice([0, 5, 40, 150])):
            page[rng.randrange(len(page))] = rng.randrange(20)
        states.append(tuple(page))
    found = []
    for position, state in enumerate(states):
        for part in found:
            if SequenceMatcher(None, states[part[0]], state, autojunk=False).ratio() >= 0.9:
                part.append(position)
                break
        else:
            found.append([position])
    assert SimilarStates().clusters(states) == found
    assert 3 < len(found) < 20


@pytest.mark.parametrize("threshold", [0.0, -0.5, 1.5, float("nan")])
def test_an_impossible_threshold_is_refused(threshold):
    with pytest.raises(ConfigError, match="threshold above 0"):
        SimilarStates(threshold)


def test_the_same_page_with_other_words_around_it_is_one_state():
    """Q is .5 to the turns left: .5, .25 and .5 of rewards 1, 1 and 0."""
    states = [["start", "page one of ten"], ["start", "page one of two"], ["start", "elsewhere"]]
    rewards = torch.tensor([1.0, 0.0, 1.0])
    rows = gigpo_step_advantages(states, rewards, 0.5, SimilarStates(0.7), centred_rewards)
    # From 'start' .25, 0 and .25: mean 1/6. From the page .5 and 0: mean .25. Elsewhere alone.
    assert [row.tolist() for row in rows] == [
        pytest.approx([1 / 12, 0.25]),
        pytest.approx([-1 / 6, -0.25]),
        pytest.approx([1 / 12, 0.0]),
    ]


def test_the_form_that_divides_by_1_keeps_the_size_of_a_difference():
    states, rewards = [["start"], ["start"], ["start"]], torch.tensor([1.0, 0.0, 0.0])
    (first, second, third) = gigpo_step_advantages(states, rewards, 0.5, compare=centred_rewards)
    # Q = .5, 0, 0; their mean is 1/6.
    assert [first.item(), second.item(), third.item()] == pytest.approx([1 / 3, -1 / 6, -1 / 6])
    asked = group([1.0, 0.0, 0.0])
    boundaries = [tool_call_boundaries(item) for item in asked.rollouts]
    credits = [TurnCredit(item.id, torch.zeros(item.num_turns)) for item in asked.rollouts]
    results = GiGPOAnchor(outcome=CentredOutcome()).anchor(asked, boundaries, [], credits)
    assert [r.outcome_advantage for r in results] == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_ragged_groups_agree_with_a_slow_oracle():
    rng = random.Random(0)
    for _ in range(50):
        states = [[rng.choice("abc") for _ in range(rng.randrange(6))] for _ in range(5)]
        rewards = [rng.choice([0.0, 0.5, 1.0]) for _ in states]
        got = gigpo_step_advantages(states, torch.tensor(rewards, dtype=torch.float64), 0.9)
        for i, visited in enumerate(states):
            for k, state in enumerate(visited):
                peers = [
                    0.9 ** (len(other) - m) * rewards[j]
                    for j, other in enumerate(states)
                    for m, seen in enumerate(other)
                    if seen == state
                ]
                own = 0.9 ** (len(visited) - k) * rewards[i]
                spread = max(peers) - min(peers)
                wanted = 0.0
                if spread > 1e-6:
                    wanted = (own - statistics.fmean(peers)) / statistics.pstdev(peers)
                assert got[i][k].item() == pytest.approx(wanted, abs=1e-6)


def test_states_are_what_was_seen_and_not_what_was_written():
    item = rollout(turns=[(3, 2), (5, 4)], prompt=4)
    first, second = observed_states(item, tool_call_boundaries(item))
    assert first == tuple(item.token_ids[:4].tolist())
    stop = item.turns[0].observation_stop
    seen = item.kinds[4:stop] != TokenKind.ACTION
    assert second == tuple(item.token_ids[4:stop][seen].tolist())


def test_without_a_common_observation_only_the_first_turn_is_compared():
    asked = group([1.0, 0.0, 0.0])
    boundaries = [tool_call_boundaries(item) for item in asked.rollouts]
    credits = [TurnCredit(item.id, torch.zeros(item.num_turns)) for item in asked.rollouts]
    results = GiGPOAnchor().anchor(asked, boundaries, [], credits)
    # Prompts are drawn for each rollout by the builder, so that no two agree.
    assert all(not result.turn_rewards.any() for result in results)
