"""Resumed runs: which one goes on, what may differ, and what is never written over."""

import csv
import json
from pathlib import Path

import pytest
import torch
import yaml
from cli_runner import run_cli

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def arguments(runs: Path) -> list[str]:
    """Settings of a run of seconds with two loggers."""
    folder = {"save_dir": str(runs), "name": "small"}
    loggers = [
        {"class_path": f"lightning.pytorch.loggers.{name}", "init_args": folder}
        for name in ("TensorBoardLogger", "CSVLogger")
    ]
    return [
        f"--config={QUICKSTART}",
        f"--trainer.logger={json.dumps(loggers)}",
        "--trainer.num_sanity_val_steps=0",
        "--trainer.check_val_every_n_epoch=1",
        "--trainer.enable_progress_bar=false",
        "--data.engine=trace_pl.engines.HFEngine",
        "--data.engine.max_model_len=1024",
        "--data.questions_per_epoch=2",
        "--data.group_size=2",
        "--data.evaluation_questions=2",
    ]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> list[str]:
    """Settings whose first run has taken one epoch."""
    settings = arguments(tmp_path_factory.mktemp("runs"))
    assert run_cli("fit", *settings, "--trainer.max_epochs=1") == 0
    return settings


@pytest.fixture
def root(small) -> Path:
    return Path(yaml.safe_load(small[1].partition("=")[2])[0]["init_args"]["save_dir"]) / "small"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def last(run: Path) -> dict:
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)


def test_what_was_not_measured_before_training_is_not_in_the_summary(small, root):
    summary = json.loads((root / "version_0" / "summary.json").read_text())
    assert summary["success_before"] is None
    assert 0.0 <= summary["success_after"] <= 1.0


def test_another_experiment_does_not_go_on_with_the_last_one(capsys, small, root):
    before = contents(root)
    changed = [
        "--credit.anchor=callbacks.OutcomeOnly",
        "--model.optimizer.init_args.lr=0.25",
        "--data.task.init_args.hops=[2]",
        "--data.engine.init_args.temperature=0.5",
    ]
    assert run_cli("fit", *small, "--ckpt_path=last", "--trainer.max_epochs=2", *changed) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "error:" in x]
    for words in (
        "version_0/checkpoints/last.ckpt",
        "credit.anchor 'callbacks.OutcomeOnly' instead of 'callbacks.TraceAnchor'",
        "model.optimizer.init_args.lr 0.25 instead of 0.0005",
        "data.task.init_args.hops [2] instead of [3]",
        "data.engine.init_args.temperature 0.5 instead of 1.0",
        "--resume_changes credit.anchor,model.optimizer,data.task,data.engine.",
    ):
        assert words in line
    assert contents(root) == before


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([f"--ckpt_path={QUICKSTART}"], [str(QUICKSTART), "a file that is none"]),
        (["--ckpt_path=last", "--trainer.max_epochs=0"], ["max_epochs of at least", "got 0"]),
        (["--ckpt_path=last", "--model.adapter.rank=4"], ["adapter"]),
        (["--resume_changes=model"], ["--ckpt_path beside --resume_changes"]),
    ],
    ids=lambda value: value[-1],
)
def test_a_checkpoint_that_can_not_go_on_is_one_line(capsys, small, root, more, words):
    before = contents(root)
    assert run_cli("fit", *small, *more) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "error:" in x]
    for word in ("Expected", *words):
        assert word in line
    assert contents(root) == before


def test_the_saved_config_begins_a_new_run_and_the_first_keeps_its_files(small, root):
    first = root / "version_0"
    before = contents(first)
    again = ["--credit.anchor=callbacks.OutcomeOnly", "--trainer.max_epochs=0"]
    again.append("--trainer.enable_checkpointing=false")
    assert run_cli("fit", f"--config={first / 'config.yaml'}", *again) == 0
    assert contents(first) == before
    second = yaml.safe_load((root / "version_1" / "config.yaml").read_text())
    assert second["credit"]["anchor"]["class_path"] == "callbacks.OutcomeOnly"
    summary = json.loads((root / "version_1" / "summary.json").read_text())
    assert (summary["updates"], summary["training_seconds"]) == (0, 0.0)


def test_a_run_goes_on_in_its_folder_with_what_was_changed_by_name(capsys, small, root):
    first = root / "version_0"
    rows = (first / "metrics.csv").read_text().count("\n")
    changed = ["--model.optimizer.init_args.lr=0.25", "--data.task.init_args.hops=[2]"]
    named = "--resume_changes=model.optimizer,data.task"
    path = f"--ckpt_path={first / 'checkpoints' / 'last.ckpt'}"
    folders = sorted(root.iterdir())
    assert run_cli("fit", *small, path, *changed, named, "--trainer.max_epochs=2") == 0
    assert sorted(root.iterdir()) == folders
    assert "lr 0.25 instead of 0.0005" in capsys.readouterr().out
    saved = last(first)
    assert (saved["global_step"], saved["epoch"]) == (4, 1)
    (state,) = saved["optimizer_states"]
    assert state["param_groups"][0]["lr"] == 0.25
    assert int(state["state"][0]["step"]) == 2  # as many as since the change
    assert saved["RolloutDataModule"]["cursor"] == 2
    assert [(c["step"], c["key"], c["before"], c["after"]) for c in saved["run"]["changes"]] == [
        (2, "model.optimizer.init_args.lr", 0.0005, 0.25),
        (2, "data.task.init_args.hops", [3], [2]),
    ]
    text = (first / "config.yaml").read_text()
    assert "# From step 2: model.optimizer.init_args.lr 0.25 instead of 0.0005." in text
    config = yaml.safe_load(text)
    assert "ckpt_path" not in config
    assert "resume_changes" not in config
    assert [logger["init_args"]["version"] for logger in config["trainer"]["logger"]] == [None] * 2
    with (first / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) > rows
    assert {row["epoch"] for row in table if row["rollout/success"]} == {"0", "1"}
    assert len(list(first.glob("events*"))) == 2


def test_an_evaluation_reads_the_weights_alone_whatever_the_data(capsys, small, root):
    others = ["--data.task.init_args.hops=[1]", "--credit.anchor=callbacks.OutcomeOnly"]
    before = contents(root)
    assert run_cli("validate", *small, "--ckpt_path=last", *others) == 0
    after = contents(root)
    assert {path: after[path] for path in before} == before
    assert "validation/success" in capsys.readouterr().out
