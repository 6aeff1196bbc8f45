"""What the data module makes of an answer format before anything is sampled."""

import warnings

import pytest
from scripted_epochs import QUESTIONS, SmallTask, make_data

from trace_pl.errors import DataError
from trace_pl.rollout.chat.answer_formats import AnswerTags, BoxedAnswer, ExactAnswerLines
from trace_pl.types import Question


@pytest.mark.parametrize(
    ("answer_format", "gold", "found"),
    [
        (AnswerTags(), "Mira</answer> Holt", "'Mira'"),
        (AnswerTags(), "a <tool_call>", "None"),
        (AnswerTags(), "<think>", "None"),
        (BoxedAnswer(), "} Mira", "''"),
        (ExactAnswerLines(), "Mira\nHolt", "'Mira'"),
    ],
)
def test_a_gold_answer_that_no_policy_could_state_is_refused(
    tiny_model_dir, monkeypatch, answer_format, gold, found
):
    asked = [*QUESTIONS[:3], Question("odd", "Who?", ("Mira", gold))]
    monkeypatch.setattr(SmallTask, "questions", lambda self, split: asked)
    data = make_data(tiny_model_dir, None, answer_format=answer_format)
    with pytest.raises(DataError, match=rf"question 'odd'.*of which {found} would be read"):
        data.open(starts_engine=False)


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"answer_format": AnswerTags("")}, True),
        ({"answer_format": BoxedAnswer("Use a box."), "system_prompt": "<answer>"}, True),
        ({"answer_format": AnswerTags(""), "system_prompt": "Write <answer>x</answer>."}, False),
        ({}, False),
    ],
)
def test_a_prompt_that_does_not_say_how_to_answer_is_warned_of(tiny_model_dir, settings, warns):
    data = make_data(tiny_model_dir, None, **settings)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        data.open(starts_engine=False)
    assert any("earns no reward" in str(warning.message) for warning in found) is warns
