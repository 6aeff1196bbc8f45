from types import SimpleNamespace

import pytest
import torch
from builders import question, rollout
from jsonargparse import ArgumentError, ArgumentParser

from callbacks.rollout_samples import render_rollout
from callbacks.value_curve import value_curves
from trace_pl.errors import ConfigError
from trace_pl.rollout.grading import Reward
from trace_pl.tasks.rewards import ExactMatchReward
from trace_pl.training.rollout_metrics import rollout_statistics
from trace_pl.types import Grade, ProbeValues, RolloutGroup


@pytest.mark.parametrize(
    ("answer", "plain", "with_bonus"),
    [
        ("the town 0!", Grade(1.0, is_correct=True), Grade(1.1, is_correct=True)),
        ("Town 1", Grade(0.0, is_correct=False), Grade(0.1, is_correct=False)),
        (" ", Grade(0.0, is_correct=False), Grade(0.0, is_correct=False)),
        (None, Grade(0.0, is_correct=False), Grade(0.0, is_correct=False)),
    ],
)
def test_a_bonus_for_the_form_makes_no_answer_right(answer, plain, with_bonus):
    assert ExactMatchReward()(question(0), answer, ()) == plain
    assert ExactMatchReward(format_bonus=0.1)(question(0), answer, ()) == with_bonus


@pytest.mark.parametrize("bonus", [-0.1, 1.0, float("nan")])
def test_a_bonus_as_large_as_a_right_answer_is_refused(bonus):
    with pytest.raises(ConfigError, match="format_bonus from 0 to below 1"):
        ExactMatchReward(bonus)


# --- a reward of the user's own -----------------------------------------------------------------

OWN = """
from collections.abc import Sequence
from trace_pl.types import Grade, Question, Turn

class Judge:
    def __init__(self, scale: float = 1.0):
        self.scale = scale
    async def __call__(
        self, question: Question, answer: str | None, turns: Sequence[Turn]
    ) -> Grade:
        return Grade(self.scale, True)

def judge(question, answer, turns):
    return Grade(2.0, False)

class Blind:
    def __call__(self, answer: str | None) -> Grade:
        return Grade(1.0, True)
"""


def built(config):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--reward", type=Reward | None)
    return parser.instantiate(parser.parse_object({"reward": config})).reward


@pytest.fixture
def own_rewards(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own_rewards")
def test_a_config_names_a_class_or_a_function_by_its_path():
    assert built("own_rewards.Judge").scale == 1.0
    judge = built({"class_path": "own_rewards.Judge", "init_args": {"scale": 0.5}})
    assert judge.scale == 0.5
    assert built("own_rewards.judge")(question(), None, ()) == Grade(2.0, is_correct=False)
    bonus = {"format_bonus": 0.2}
    path = "trace_pl.tasks.ExactMatchReward"
    assert built({"class_path": path, "init_args": bonus}).format_bonus == 0.2


@pytest.mark.usefixtures("own_rewards")
def test_a_class_that_can_not_be_called_so_is_refused_by_the_parser():
    with pytest.raises(ArgumentError, match="does not implement protocol Reward"):
        built("own_rewards.Blind")


# --- what counts as success ---------------------------------------------------------------------


def test_success_counts_right_answers_and_not_positive_rewards():
    paid, right = rollout(reward=0.1, is_correct=False), rollout(1, reward=0.0, is_correct=True)
    items = rollout_statistics([paid, right])
    assert items["success"].tolist() == [0.0, 1.0]
    assert items["reward"].tolist() == [0.1, 0.0]
    assert "wrong, reward 0.1" in render_rollout(paid, str, [0.0])
    group = RolloutGroup(paid.question, (paid, right))
    values = [torch.tensor([0.0, 1.0]), torch.tensor([0.0, 2.0])]
    report = SimpleNamespace(
        values=[ProbeValues(r.id, v, v) for r, v in zip(group.rollouts, values, strict=True)]
    )
    assert value_curves([group], report) == {
        "right answer": [(0, 0.0), (1, 2.0)],
        "wrong answer": [(0, 0.0), (1, 1.0)],
    }
