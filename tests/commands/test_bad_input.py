import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from cli_runner import run_cli

from trace_pl.models.names import resolve_model

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


@pytest.fixture
def fit(tmp_path, capsys):
    """Run fit; return its exit code and what it printed on stderr. Nothing may be left behind."""
    runs = tmp_path / "runs"

    def run(*arguments: str) -> tuple[int, str]:
        code = run_cli(
            "fit", "--config", QUICKSTART, f"--trainer.logger.init_args.save_dir={runs}", *arguments
        )
        assert not [path for path in runs.rglob("*") if path.is_file()]
        return code, capsys.readouterr().err

    return run


PAGE = {"id": "d1", "title": "T", "text": "x"}


def write_task(folder: Path, question: dict | None = None, documents: Sequence[dict] = (PAGE,)):
    good = {"id": "q1", "question": "Who is it?", "answer": "Miden Tedum"}
    rows = {
        "train.jsonl": [question or good],
        "validation.jsonl": [{**good, "id": "q2"}],
        "corpus.jsonl": documents,
    }
    for name, content in rows.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in content))
    task = "--data.task.init_args"
    return [
        "--data.questions_per_epoch=1",
        "--data.task=trace_pl.tasks.FileTask",
        f"{task}.index=trace_pl.tools.Bm25Index",  # nothing in the cache of who tests
        f"{task}.corpus={folder / 'corpus.jsonl'}",
        f"{task}.train={folder / 'train.jsonl'}",
        f"{task}.validation={folder / 'validation.jsonl'}",
    ]


def model_without_template(folder: Path) -> Path:
    shutil.copytree(resolve_model("closed-web-base"), folder)
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def model_without_results(folder: Path) -> Path:
    """A model whose template shows no tool result."""
    shutil.copytree(resolve_model("closed-web-base"), folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages if m.role != 'tool' %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return folder


def assert_one_line(code: int, error: str, *words: str) -> None:
    assert code == 2
    (line,) = [line for line in error.splitlines() if line.startswith("trace-pl: error:")]
    for word in ("Expected", *words):
        assert word in line


def test_an_unknown_model_path_is_one_line(fit):
    assert_one_line(*fit("--model.model_name=./no/such/model"), "./no/such/model", "model_name")


def test_a_tokenizer_without_chat_template_is_one_line(fit, tmp_path):
    folder = model_without_template(tmp_path / "bare")
    assert_one_line(*fit(f"--model.model_name={folder}"), "chat template", "bare")


def test_a_template_without_tool_results_is_one_line(fit, tmp_path):
    folder = model_without_results(tmp_path / "toolless")
    assert_one_line(*fit(f"--model.model_name={folder}"), "exactly once", "`tool`", "toolless")


def test_a_missing_corpus_is_one_line(fit, tmp_path):
    arguments = write_task(tmp_path)
    (tmp_path / "corpus.jsonl").unlink()
    assert_one_line(*fit(*arguments), "corpus.jsonl")


def test_an_empty_corpus_is_one_line(fit, tmp_path):
    assert_one_line(*fit(*write_task(tmp_path, documents=[])), "corpus.jsonl")


def test_a_question_without_gold_answer_is_one_line_with_its_row(fit, tmp_path):
    arguments = write_task(tmp_path, question={"id": "q1", "question": "Who?", "answer": " "})
    assert_one_line(*fit(*arguments), "train.jsonl:1", "answer")


def test_fewer_training_questions_than_an_epoch_takes_is_one_line(fit, tmp_path):
    arguments = [*write_task(tmp_path), "--data.questions_per_epoch=3", "--data.extra_questions=2"]
    words = ("at least 5 training questions", "extra_questions", "got 1")
    assert_one_line(*fit(*arguments), *words)


def test_evidence_that_is_no_list_is_one_line_with_its_row(fit, tmp_path):
    question = {"id": "q1", "question": "Who?", "answer": "Mira", "evidence": "d1"}
    assert_one_line(*fit(*write_task(tmp_path, question)), "train.jsonl:1", "list of docids")


def test_a_group_of_one_is_one_line(fit):
    assert_one_line(*fit("--data.group_size=1"), "group_size", "at least 2")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--credit.backup.init_args.num_steps=0"], ["num_steps of at least 1", "0"]),
        (["--credit.backup.init_args.discount=1.5"], ["discount from 0 to 1", "1.5"]),
        (["--credit.anchor.init_args.turn_weight=-1"], ["turn_weight", "-1"]),
        (
            [
                "--credit.prober.init_args.value=trace_pl.credit.LogRatioValue",
                "--credit.prober.init_args.value.init_args.epsilon=0",
            ],
            ["epsilon above 0", "0"],
        ),
        (["--model.loss.init_args.clip_low=1"], ["clip_low", "1"]),
        (["--model.reference_name=nowhere/last.ckpt"], ["nowhere/last.ckpt"]),
    ],
    ids=lambda value: value[-1],
)
def test_an_impossible_setting_is_one_line_before_any_model_loads(
    fit, monkeypatch, arguments, words
):
    def refuse(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("trace_pl.training.policy_module.load_model", refuse)
    monkeypatch.setattr("trace_pl.training.agent_setup.load_tokenizer", refuse)
    assert_one_line(*fit(*arguments), *words)


def test_too_little_memory_for_the_cache_is_one_line(fit):
    code, error = fit("--data.engine.init_args.kv_cache_gib=100000")
    assert_one_line(code, error, "kv_cache_gib")


def test_a_prompt_longer_than_the_limit_is_one_line_with_the_question(fit):
    code, error = fit("--data.limits.max_trajectory_tokens=10")
    assert_one_line(code, error, "max_trajectory_tokens", "question 'page-")


def test_a_trajectory_longer_than_the_engine_reads_is_one_line(fit):
    assert_one_line(*fit("--data.engine.init_args.max_model_len=64"), "max_model_len")


def test_resuming_without_a_checkpoint_is_one_line(fit):
    assert_one_line(*fit("--ckpt_path=last"), "last.ckpt")


def test_a_run_folder_that_can_not_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("not a folder")
    code = run_cli(
        "fit", "--config", QUICKSTART, f"--trainer.logger.init_args.save_dir={tmp_path}/file"
    )
    assert_one_line(code, capsys.readouterr().err, "writable", "save_dir")


def test_a_missing_vllm_is_one_line_with_what_to_install(fit, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert_one_line(*fit(), "vllm", "pip install")
