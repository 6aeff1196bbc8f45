"""What a record of `trace-pl predict` says, and what becomes of the records of several ranks."""

import json
from types import SimpleNamespace

import lightning
import pytest
from agent_runs import ANSWER, LIMITS, TEMPLATE, page, question, run, run_one
from scripted import search

from callbacks.rollout_writer import RolloutWriter, lost_record, rollout_record
from trace_pl.errors import ConfigError
from trace_pl.files import write_atomically
from trace_pl.rollout.trajectory import AgentLimits
from trace_pl.training.minibatch import EvaluationBatch
from trace_pl.types import Question, RolloutGroup, ToolResult

THINKING = f"<think>The tower.</think>{search('Arden')}"


def test_a_record_holds_all_that_was_said_once_and_how_it_ended():
    record = rollout_record(run_one([THINKING, ANSWER]), TEMPLATE, "Be brief.")
    assert record.pop("prompt").endswith("Who built the tower?<|im_end|>\n")
    assert record.pop("logprob") < sum(turn["logprob"] for turn in record["turns"]) < 0.0
    record["turns"][0].pop("logprob")
    num_call, num_answer = (len(TEMPLATE.encode_markup(text)) + 1 for text in (THINKING, ANSWER))
    assert record["tokens"]["action"] == num_call + num_answer
    record.pop("tokens")
    assert record == {
        "question_id": "q1",
        "question": "Who built the tower?",
        "gold": ["Mira Holt"],
        "meta": {},
        "answer": "Mira Holt",
        "is_correct": True,
        "reward": 1.0,
        "stop_reason": "answered",
        "policy_version": 7,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Who built the tower?"},
            {"role": "assistant", "content": THINKING},
            {"role": "tool", "content": "page 0 on Arden"},
            {"role": "assistant", "content": ANSWER},
        ],
        "final_message": ANSWER,
        "turns": [
            {
                "message": 2,
                "tool": "search",
                "arguments": {"query": "Arden"},
                "error": None,
                "docids": ["d0"],
                "score": None,
                "tokens": num_call,
            }
        ],
    }


@pytest.mark.parametrize(
    ("script", "limits", "stop_reason", "final"),
    [
        ([ANSWER], LIMITS, "answered", ANSWER),
        ([search("a"), search("b")], AgentLimits(1, 200, 2000), "max_turns", search("b")),
        ([f"{ANSWER} and"], AgentLimits(5, 2, 2000), "length", "<answer"),
        ([search("a")] * 3, AgentLimits(5, 200, 2000, 1), "tool_failure", None),
    ],
    ids=["answered", "max_turns", "length", "tool_failure"],
)
def test_the_final_message_is_what_the_policy_wrote_last(script, limits, stop_reason, final):
    fails = stop_reason == "tool_failure"
    tools = (lambda *_: ToolResult("Error", error="tool")) if fails else page
    record = rollout_record(run_one(script, tools=tools, limits=limits), TEMPLATE)
    assert record["stop_reason"] == stop_reason
    assert record["final_message"] == final
    assert record["messages"][-1]["role"] == ("tool" if final is None else "assistant")


def test_a_lost_rollout_leaves_a_record_of_the_same_fields():
    lost = lost_record(question())
    assert lost.keys() == rollout_record(run_one([ANSWER]), TEMPLATE).keys()
    assert (lost["question_id"], lost["stop_reason"], lost["is_correct"]) == ("q1", None, None)


def written(folder, groups):
    """Let the callback write these groups and return the lines of its file."""
    trainer = SimpleNamespace(
        log_dir=None,
        default_root_dir=str(folder),
        datamodule=SimpleNamespace(template=TEMPLATE, agent=SimpleNamespace(system_prompt="")),
        ckpt_path="runs/last.ckpt",
        loggers=[],
    )
    module, writer = SimpleNamespace(model_name="tiny"), RolloutWriter()
    writer.on_predict_start(trainer, module)
    batch = EvaluationBatch(dict(enumerate(groups)))
    writer.on_predict_batch_end(trainer, module, batch, batch, 0)
    writer.on_predict_epoch_end(trainer, module)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_question_has_a_line_that_names_model_and_checkpoint(tmp_path, capsys):
    asked = [question("q1"), Question("q2", "Who?", ("x",), {"level": 3})]
    _, groups = run({"*": [ANSWER]}, questions=asked)
    written(tmp_path, [*groups, RolloutGroup(question("q3"), ())])
    found = lines(tmp_path / "rollouts.jsonl")
    assert [line["question_id"] for line in found] == ["q1", "q2", "q3"]
    assert [line["is_correct"] for line in found] == [True, False, None]
    assert found[1]["meta"] == {"level": 3}
    run_fields = {"model": "tiny", "checkpoint": "runs/last.ckpt", "config": None}
    assert [line["run"] for line in found] == [run_fields] * 3
    assert capsys.readouterr().out == f"3 rollouts in {tmp_path / 'rollouts.jsonl'}\n"


def test_a_lone_surrogate_is_written_as_the_escape_that_json_has_for_it(tmp_path):
    path = tmp_path / "made" / "x.json"
    write_atomically(path, json.dumps("caf\u00e9 \ud83d", ensure_ascii=False))
    assert path.read_bytes() == b'"caf\xc3\xa9 \\ud83d"'
    assert json.loads(path.read_text()) == "caf\u00e9 \ud83d"
    assert path.stat().st_mode & 0o777 == 0o644
    assert len(list(path.parent.iterdir())) == 1


def test_a_second_run_in_the_same_folder_leaves_the_first_ones_file(tmp_path):
    _, groups = run({"*": [ANSWER]})
    written(tmp_path, groups)
    written(tmp_path, groups * 2)
    assert len(lines(tmp_path / "rollouts.jsonl")) == 1
    assert len(lines(tmp_path / "rollouts-1.jsonl")) == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_can_not_be_written_is_refused_before_anything_is_sampled(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"writable folder .*default_root_dir"):
        written(tmp_path / "file", [])


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "32-true"])
def test_the_trainer_leaves_batches_of_rollouts_whole_in_every_precision(precision):
    _, groups = run({"*": [ANSWER]})
    batch = EvaluationBatch(dict(enumerate(groups)))
    trainer = lightning.Trainer(
        accelerator="cpu", precision=precision, logger=False, enable_checkpointing=False
    )
    assert trainer.precision_plugin.convert_input(batch) is batch
    assert batch.groups[0].rollouts[0].logprobs.dtype.itemsize == 4
