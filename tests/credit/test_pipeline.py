import math
from dataclasses import replace

import pytest
import torch
from builders import group
from lightning.pytorch.callbacks import Timer
from lookup_scorer import LetterTemplate, LookupScorer, random_scorer

from callbacks import FrozenReferenceProber, KStepTD, OutcomeOnly, ToolCallSegmenter, TraceAnchor
from trace_pl.credit.pipeline import CreditPipeline
from trace_pl.credit.stages import Anchor, Backup, Prober, Segmenter
from trace_pl.errors import ConfigError, CreditError
from trace_pl.types import (
    Boundaries,
    ProbeValues,
    RolloutGroup,
    TokenAdvantages,
    TurnCredit,
)

PIPELINE = CreditPipeline(ToolCallSegmenter(), FrozenReferenceProber(), KStepTD(), TraceAnchor())


def run(pipeline=PIPELINE, groups=None, scorer=None):
    groups = [group([1.0, 0.0, 0.0], number=0), group([0.0, 0.0], 1)] if groups is None else groups
    rollouts = [item for each in groups for item in each.rollouts]
    scorer = scorer or random_scorer(rollouts)
    return rollouts, pipeline.run(groups, scorer, LetterTemplate())


def test_a_rollout_gets_the_advantages_worked_out_by_hand():
    """One turn, l = -6, -1: c = log(6.1 / 1.1) = 1.712979; A = 1, r = c + 2 * 0.8 = 3.312979.

    The failed rollout has two turns that change nothing: r = -2 * 0.64 and -2 * 0.8.
    """
    asked = group([1.0, 0.0])
    table = {"q0/0": torch.tensor([[-6.0], [-1.0]]), "q0/1": torch.full((3, 1), -2.0)}
    _, report = run(groups=[asked], scorer=LookupScorer(table))
    first, second = report.advantages
    torch.testing.assert_close(first.turn_rewards, torch.tensor([3.312979]), atol=1e-5, rtol=0.0)
    on_action = torch.tensor([1.0 + 0.2 * 3.312979] * 2)
    torch.testing.assert_close(first.advantages[5:7], on_action, atol=1e-5, rtol=0.0)
    torch.testing.assert_close(first.advantages[-2:], torch.tensor([1.0, 1.0]), atol=0.0, rtol=0.0)
    wanted = torch.tensor([-1.28, -1.60])
    torch.testing.assert_close(second.turn_rewards, wanted, atol=1e-6, rtol=0.0)
    assert (first.outcome_advantage, second.outcome_advantage) == (1.0, -1.0)


def test_results_follow_the_order_of_the_groups():
    rollouts, report = run()
    names = [item.id for item in rollouts]
    assert names == ["q0/0", "q0/1", "q0/2", "q1/0", "q1/1"]
    for results in (report.boundaries, report.values, report.credits, report.advantages):
        assert [result.rollout_id for result in results] == names


def test_advantages_vanish_on_every_token_that_was_not_sampled():
    rollouts, report = run()
    for item, result in zip(rollouts, report.advantages, strict=True):
        assert (result.advantages[~item.loss_mask] == 0.0).all()
        assert (result.advantages[item.loss_mask] != 0.0).any()


def test_a_group_of_failures_still_trains_on_turn_credit():
    rollouts, report = run(groups=[group([0.0, 0.0, 0.0])])
    for item, result in zip(rollouts, report.advantages, strict=True):
        assert result.outcome_advantage == 0.0
        assert (result.advantages[item.loss_mask] != 0.0).sum() == sum(
            turn.action_stop - turn.action_start for turn in item.turns
        )


def test_permuting_a_group_permutes_its_advantages():
    asked = group([1.0, 0.0, 0.0, 1.0])
    scorer = random_scorer(asked.rollouts)
    _, report = run(groups=[asked], scorer=scorer)
    order = [2, 0, 3, 1]
    shuffled = RolloutGroup(asked.question, tuple(asked.rollouts[i] for i in order))
    _, permuted = run(groups=[shuffled], scorer=scorer)
    for place, original in enumerate(order):
        torch.testing.assert_close(
            permuted.advantages[place].advantages,
            report.advantages[original].advantages,
            atol=1e-6,
            rtol=1e-6,
        )


def test_outcome_only_never_asks_the_scorer():
    scorer = LookupScorer({})
    rollouts, report = run(replace(PIPELINE, anchor=OutcomeOnly()), [group([1.0, 0.0])], scorer)
    assert scorer.requests == []
    assert report.values == []
    assert [credit.credit.tolist() for credit in report.credits] == [[0.0], [0.0, 0.0]]
    for item, result, outcome in zip(rollouts, report.advantages, (1.0, -1.0), strict=True):
        torch.testing.assert_close(
            result.advantages, outcome * item.loss_mask.float(), atol=0.0, rtol=0.0
        )


def test_trace_without_turn_weight_equals_outcome_only():
    groups = [group([1.0, 0.0, 0.0])]
    _, trace = run(replace(PIPELINE, anchor=TraceAnchor(turn_weight=0.0)), groups)
    _, outcome = run(replace(PIPELINE, anchor=OutcomeOnly()), groups)
    for one, other in zip(trace.advantages, outcome.advantages, strict=True):
        torch.testing.assert_close(one.advantages, other.advantages, atol=0.0, rtol=0.0)


def test_no_groups_give_an_empty_report():
    _, report = run(groups=[])
    assert report.boundaries == report.values == report.credits == report.advantages == []


def test_pipeline_is_collected_from_a_trainers_callbacks():
    stages = [TraceAnchor(), Timer(), KStepTD(), FrozenReferenceProber(), ToolCallSegmenter()]
    pipeline = CreditPipeline.from_callbacks(stages)
    assert pipeline == CreditPipeline(stages[4], stages[3], stages[2], stages[0])


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([ToolCallSegmenter(), FrozenReferenceProber(), KStepTD()], r"one anchor .* got 0 in"),
        ([ToolCallSegmenter(), ToolCallSegmenter()], r"one segmenter .* got 2 in"),
        ([ToolCallSegmenter(), Timer()], r"got 0 in \['ToolCallSegmenter', 'Timer'\]"),
    ],
)
def test_a_slot_filled_other_than_once_is_refused_with_what_was_seen(stages, message):
    with pytest.raises(ConfigError, match=message):
        CreditPipeline.from_callbacks(stages)


class BeyondTheEnd(Segmenter):
    def segment(self, rollout, template):
        return Boundaries(rollout.id, (1, len(rollout.token_ids) + 1))


class ForgetsTheName(Segmenter):
    def segment(self, rollout, template):
        return Boundaries("other", (1,))


class ForgetsARollout(Prober):
    def probe(self, rollouts, boundaries, scorer, template):
        return []


class Constant(Prober):
    """Values of a given length and content for every rollout."""

    def __init__(self, values, mean_logprobs):
        self.values, self.mean_logprobs = torch.tensor(values), torch.tensor(mean_logprobs)

    def probe(self, rollouts, boundaries, scorer, template):
        return [ProbeValues(item.id, self.mean_logprobs, self.values) for item in rollouts]


class ConstantCredit(Backup):
    def __init__(self, credit):
        self.credit = torch.tensor(credit)

    def backup(self, values):
        return TurnCredit(values.rollout_id, self.credit)


class EveryToken(Anchor):
    """Writes one number on all tokens, sampled or not."""

    def __init__(self, number, num_rewards=1):
        self.number, self.num_rewards = number, num_rewards

    def anchor(self, group, boundaries, values, credits):
        return [
            TokenAdvantages(
                item.id,
                torch.full((len(item.token_ids),), self.number),
                0.0,
                torch.zeros(self.num_rewards),
            )
            for item in group.rollouts
        ]


@pytest.mark.parametrize(
    ("slot", "stage", "message"),
    [
        ("segmenter", BeyondTheEnd(), r"within the 15 tokens of rollout q0/0.*credit\.segmenter"),
        (
            "segmenter",
            ForgetsTheName(),
            r"rollout q0/0 from `credit\.segmenter`, got one for other",
        ),
        ("prober", ForgetsARollout(), r"1 results from `credit\.prober`, got 0"),
        ("prober", Constant([0.0], [0.0, 0.0]), r"one value for each of 2 boundaries of .*q0/0"),
        ("prober", Constant([0.0, 0.0], [0.0]), r"one mean log-prob for each of 2 boundaries"),
        ("prober", Constant([0.0, math.nan], [0.0, 0.0]), r"finite value at position 1 .*q0/0"),
        ("backup", ConstantCredit([1.0, 2.0]), r"one credit for each of 1 turns .*credit\.backup"),
        ("backup", ConstantCredit([math.inf]), r"finite credit at position 0 .*q0/0"),
        ("anchor", EveryToken(1.0), r"advantage 0 at token 0 of rollout q0/0.*credit\.anchor"),
        ("anchor", EveryToken(math.nan), r"finite advantage at position 0"),
        ("anchor", EveryToken(0.0, num_rewards=2), r"one turn reward for each of 1 turns"),
    ],
)
def test_a_stage_that_breaks_its_contract_is_named(slot, stage, message):
    with pytest.raises(CreditError, match=message):
        run(replace(PIPELINE, **{slot: stage}), [group([1.0])])
