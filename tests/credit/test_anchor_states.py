import random
import statistics

import pytest
import torch
from builders import group, rollout

from callbacks import AnchorStates
from trace_pl.credit.anchor_states import anchor_state_advantages, observed_states
from trace_pl.credit.boundaries import tool_call_boundaries
from trace_pl.types import TokenKind, TurnCredit


def test_turns_from_one_state_are_compared_and_lone_turns_get_nothing():
    """Both start alike; the second rollout then sees a page that nobody else saw."""
    advantages = anchor_state_advantages(
        [["start", "page"], ["start", "other"]], torch.tensor([1.0, 0.0]), discount=0.5
    )
    assert [row.tolist() for row in advantages] == [[1.0, 0.0], [-1.0, 0.0]]


def test_a_detour_is_worth_less_than_the_straight_way_from_the_same_state():
    """Q is gamma to the turns left: .25 and .5 from 'page' in one rollout, .5 in the other."""
    detour, straight = anchor_state_advantages(
        [["start", "page", "page"], ["start", "page"]], torch.tensor([1.0, 1.0]), discount=0.5
    )
    values = [0.25, 0.5, 0.5]
    mean, deviation = statistics.fmean(values), statistics.pstdev(values)
    expected = [(value - mean) / deviation for value in values]
    assert detour.tolist() == pytest.approx([-1.0, expected[0], expected[1]], abs=1e-6)
    assert straight.tolist() == pytest.approx([1.0, expected[2]], abs=1e-6)


def test_ragged_groups_agree_with_a_slow_oracle():
    rng = random.Random(0)
    for _ in range(50):
        states = [[rng.choice("abc") for _ in range(rng.randrange(6))] for _ in range(5)]
        rewards = [rng.choice([0.0, 0.5, 1.0]) for _ in states]
        got = anchor_state_advantages(states, torch.tensor(rewards, dtype=torch.float64), 0.9)
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
    results = AnchorStates().anchor(asked, boundaries, credits)
    # Prompts are drawn for each rollout by the builder, so that no two agree.
    assert all(not result.turn_rewards.any() for result in results)
