"""Every stage that ships in ``callbacks`` keeps the promises of its slot."""

import importlib
import inspect
import pickle
import pkgutil
from dataclasses import replace

import pytest
import torch
from builders import question, rollout
from lookup_scorer import LetterTemplate, random_scorer

import callbacks
from callbacks.controls import Control
from trace_pl.credit.boundaries import tool_call_boundaries
from trace_pl.credit.checks import (
    check_advantages,
    check_boundaries,
    check_credit,
    check_results,
    check_values,
)
from trace_pl.credit.stages import Anchor, Backup, Prober, Segmenter
from trace_pl.types import ProbeValues, RolloutGroup, TurnCredit

SLOTS = (Segmenter, Prober, Backup, Anchor)
ASKED = [replace(question(number), meta={"evidence": ["p"]}) for number in range(4)]


def shipped_classes(slot):
    """All concrete classes of a slot, found by walking the package."""
    modules = [
        importlib.import_module(f"callbacks.{found.name}")
        for found in pkgutil.iter_modules(callbacks.__path__)
    ]
    classes = {
        member
        for module in modules
        for _, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, slot) and not inspect.isabstract(member)
    }
    return sorted(classes, key=lambda member: member.__name__)


def every(slot):
    return pytest.mark.parametrize("stage_class", shipped_classes(slot))


@pytest.fixture(params=range(4))
def asked(request):
    """A group of rollouts with 0 to 6 turns of random lengths and both outcomes."""
    generator = torch.Generator().manual_seed(request.param)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    rollouts = tuple(
        rollout(
            index,
            turns=[(draw(1, 9), draw(1, 9)) for _ in range(num_turns)],
            final=draw(1, 5),
            prompt=draw(1, 9),
            reward=float(index % 2),
            of=ASKED[request.param],
        )
        for index, num_turns in enumerate([0, 6, draw(1, 6), draw(1, 6)])
    )
    return RolloutGroup(ASKED[request.param], rollouts)


def build(stage_class):
    """Return the stage with its defaults, after a trip through pickle and its own state."""
    original = stage_class()
    stage = pickle.loads(pickle.dumps(original))
    fresh = stage_class()
    fresh.load_state_dict(stage.state_dict())
    assert vars(fresh) == vars(stage) == vars(original)
    return fresh


@pytest.mark.parametrize("slot", SLOTS)
def test_every_slot_has_a_stage_to_put_in(slot):
    assert shipped_classes(slot)


@every(Segmenter)
def test_segmenter_gives_boundaries_within_each_rollout(stage_class, asked):
    boundaries = [build(stage_class).segment(item, LetterTemplate()) for item in asked.rollouts]
    check_results("credit.segmenter", asked.rollouts, boundaries)
    for item, ends in zip(asked.rollouts, boundaries, strict=True):
        check_boundaries(item, ends)
        assert ends.prefix_ends[0] >= item.prompt_length


@every(Prober)
def test_prober_gives_finite_values_that_start_at_zero(stage_class, asked):
    boundaries = [tool_call_boundaries(item) for item in asked.rollouts]
    values = build(stage_class).probe(
        asked.rollouts, boundaries, random_scorer(asked.rollouts), LetterTemplate()
    )
    check_results("credit.prober", asked.rollouts, values)
    for ends, probed in zip(boundaries, values, strict=True):
        check_values(ends, probed)
        assert probed.values[0].item() == 0.0
        assert probed.values.dtype == probed.mean_logprobs.dtype == torch.float32


@pytest.mark.parametrize(
    "stage_class", [each for each in shipped_classes(Backup) if not issubclass(each, Control)]
)
def test_backup_gives_a_finite_number_to_each_turn_and_nothing_for_no_gain(stage_class, asked):
    stage = build(stage_class)
    for item in asked.rollouts:
        boundaries = tool_call_boundaries(item)
        num_boundaries = boundaries.num_turns + 1
        logprobs = -torch.ones(num_boundaries)
        rising = ProbeValues(item.id, logprobs, torch.arange(float(num_boundaries)))
        credit = stage.backup(rising)
        check_results("credit.backup", [item], [credit])
        check_credit(boundaries, credit)
        assert (credit.credit > 0.0).all()
        level = stage.backup(ProbeValues(item.id, logprobs, torch.zeros(num_boundaries)))
        torch.testing.assert_close(
            level.credit, torch.zeros(boundaries.num_turns), atol=0.0, rtol=0.0
        )


def told(asked, credit):
    """Return values that end at the reward, and the same credit for every turn."""
    values = [
        ProbeValues(
            item.id,
            -torch.ones(item.num_turns + 1),
            torch.tensor([0.0] * item.num_turns + [item.reward]),
        )
        for item in asked.rollouts
    ]
    return values, [
        TurnCredit(item.id, torch.full((item.num_turns,), credit)) for item in asked.rollouts
    ]


@every(Anchor)
def test_anchor_writes_on_sampled_tokens_only_and_follows_the_outcome(stage_class, asked):
    boundaries = [tool_call_boundaries(item) for item in asked.rollouts]
    results = build(stage_class).anchor(asked, boundaries, *told(asked, 0.0))
    check_results("credit.anchor", asked.rollouts, results)
    for item, ends, result in zip(asked.rollouts, boundaries, results, strict=True):
        check_advantages(item, ends, result)
        assert result.advantages.dtype == torch.float32
        outcome_sign = 1.0 if item.is_correct else -1.0
        assert (result.advantages[item.loss_mask] * outcome_sign > 0.0).all()


@every(Anchor)
def test_anchor_does_not_depend_on_the_order_of_the_group(stage_class, asked):
    boundaries = [tool_call_boundaries(item) for item in asked.rollouts]
    values, credits = told(asked, 1.0)
    forwards = stage_class().anchor(asked, boundaries, values, credits)
    reverse = RolloutGroup(asked.question, asked.rollouts[::-1])
    backwards = stage_class().anchor(reverse, boundaries[::-1], values[::-1], credits[::-1])
    for one, other in zip(forwards, backwards[::-1], strict=True):
        torch.testing.assert_close(one.advantages, other.advantages, atol=1e-6, rtol=1e-6)
