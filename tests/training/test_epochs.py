"""Whole epochs with a scripted policy: over-sampling, and what a run does when everything fails."""

from types import SimpleNamespace

import pytest
import torch
from agent_runs import ANSWER, TEMPLATE, page
from families import family
from lightning.pytorch.trainer.states import TrainerFn
from scripted import ScriptedEngine, search
from scripted_epochs import fit, make_data

from trace_pl.engines.protocol import Completion
from trace_pl.errors import ConfigError, RolloutError
from trace_pl.rollout.chat.answer_formats import AnswerTags


def asked(engine):
    """Ids of the questions in the order of their first request."""
    return list(dict.fromkeys(request.stream.split("/")[1] for request in engine.requests))


# --- over-sampling ---------------------------------------------------------------------------


def test_an_epoch_ends_when_enough_groups_are_complete_and_the_others_come_first_next(
    tiny_model_dir,
):
    engine = ScriptedEngine(TEMPLATE, {"*": [ANSWER]})
    data = make_data(tiny_model_dir, engine, extra_questions=2)
    data.open()
    data.push_weights = lambda: None  # there is no trainer
    first = [q.id for q in data._stream.take(5)]
    data._stream._cursor = 0
    slow = {first[1], first[3]}
    engine.is_held = lambda rollout, step: rollout.split("/")[0] in slow
    data.train_dataloader()
    assert asked(engine) == first
    assert not engine.has_unfinished()
    assert [group.question.id for group in data.buffer.groups] == [first[0], first[2], first[4]]
    assert data.state_dict()["returned"] == [first[1], first[3]]

    engine.requests.clear()
    engine.is_held = lambda rollout, step: False
    data.buffer.was_read = True
    data.train_dataloader()
    assert asked(engine)[:2] == [first[1], first[3]]
    assert len(data.buffer.groups) == 3


def test_a_group_without_rollouts_does_not_count_as_one(tiny_model_dir):
    def down_for_one(question, call, number):
        if question == broken:
            raise ConnectionError("service is down")
        return page(question, call, number)

    engine = ScriptedEngine(TEMPLATE, {"*": [search("a"), search("a"), ANSWER]})
    data = make_data(tiny_model_dir, engine, down_for_one, extra_questions=1)
    data.open()
    data.push_weights = lambda: None
    broken = data._stream.take(1)[0].text
    data._stream._cursor = 0
    data.train_dataloader()
    assert [len(group.rollouts) for group in data.buffer.groups] == [2, 2, 2]
    assert broken not in {group.question.text for group in data.buffer.groups}


def test_without_extra_questions_every_group_is_waited_for(tiny_model_dir):
    engine = ScriptedEngine(TEMPLATE, {"*": [ANSWER]})
    engine.is_held = lambda rollout, step: step < 4 and rollout.endswith("/1")
    data = make_data(tiny_model_dir, engine)
    data.open()
    data.push_weights = lambda: None
    data.train_dataloader()
    assert [len(group.rollouts) for group in data.buffer.groups] == [2, 2, 2]
    assert [group.question.id for group in data.buffer.groups] == asked(engine)
    assert data.state_dict()["returned"] == []


def test_a_run_that_does_not_train_takes_the_checkpoint_of_another_task(tiny_model_dir):
    data = make_data(tiny_model_dir, None)
    state = {"fingerprint": "another", "cursor": 3}
    data.trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.TESTING))
    data.load_state_dict(state)
    data.trainer.state.fn = TrainerFn.FITTING
    with pytest.raises(ConfigError, match="training questions of the checkpoint"):
        data.load_state_dict(state)


def test_fewer_than_no_extra_questions_are_refused(tiny_model_dir):
    with pytest.raises(ConfigError, match=r"data.extra_questions of at least 0, got -1"):
        make_data(tiny_model_dir, None, extra_questions=-1)


def test_a_model_whose_template_knows_no_tools_reads_of_them_in_the_system_prompt(tmp_path):
    family("smollm2").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    data = make_data(tmp_path, ScriptedEngine(TEMPLATE, {}), system_prompt="Be brief.")
    data.open()
    prompt = data.template.decode(data.template.prompt_ids("Be brief.", "Who?"))
    assert f"Be brief.\n\n{AnswerTags().instruction}\n\n# Tools" in prompt
    assert "<tool_call>" in prompt


# --- faults ----------------------------------------------------------------------------------


def test_a_tool_service_that_is_down_for_a_whole_epoch_stops_the_run(tiny_model_dir):
    def down(question, call, number):
        raise ConnectionError("service is down")

    engine = ScriptedEngine(TEMPLATE, {"*": [search("a")] * 2})
    with pytest.raises(RolloutError, match=r"all 6 failed.*ConnectionError: service is down"):
        fit(make_data(tiny_model_dir, engine, down))
    assert not engine.has_unfinished()


def test_an_epoch_is_trained_on_what_is_left_of_it(tiny_model_dir):
    def down_for_some(question, call, number):
        if question[-2] in "02468":
            raise ConnectionError("service is down")
        return page(question, call, number)

    engine = ScriptedEngine(TEMPLATE, {"*": [search("a"), search("a"), ANSWER]})
    data = make_data(tiny_model_dir, engine, down_for_some, questions_per_epoch=9)
    _, metrics = fit(data)
    assert [len(group.rollouts) for group in data.buffer.groups] == [2] * 4
    assert metrics["loss/policy_loss"].isfinite()


def unchanged(module):
    with module.reading_reference() as reference:
        return all(
            torch.equal(tensor, reference.state_dict()[name])
            for name, tensor in module.policy.state_dict().items()
        )


@pytest.mark.parametrize("text", [ANSWER, "<answer>Somebody else</answer>", ""])
def test_groups_of_equal_rewards_give_a_finite_step_of_exactly_zero(tiny_model_dir, text):
    engine = ScriptedEngine(TEMPLATE, {"*": [text]})
    module, metrics = fit(make_data(tiny_model_dir, engine))
    assert metrics["loss/policy_loss"] == 0.0
    assert metrics["loss/gradient_norm"] == 0.0
    assert unchanged(module)


class SometimesSilent(ScriptedEngine):
    """Gives no token at all where the script says so."""

    def _complete(self, request):
        completion = super()._complete(request)
        if "silence" in self.template.decode(completion.token_ids):
            return Completion(request.request_id, (), (), "length")
        return completion


def test_responses_without_a_token_are_trained_around(tiny_model_dir):
    script = {"*": [ANSWER]} | {f"q{i}/1": ["silence"] for i in range(9)}
    module, metrics = fit(make_data(tiny_model_dir, SometimesSilent(TEMPLATE, script)))
    assert metrics["loss/policy_loss"].isfinite()
    assert metrics["loss/gradient_norm"] > 0.0
    assert not unchanged(module)


def test_an_epoch_without_a_single_sampled_token_is_a_finite_step_of_zero(tiny_model_dir):
    engine = SometimesSilent(TEMPLATE, {"*": ["silence"]})
    module, metrics = fit(make_data(tiny_model_dir, engine))
    assert metrics["loss/policy_loss"] == 0.0
    assert metrics["loss/gradient_norm"] == 0.0
    assert unchanged(module)
