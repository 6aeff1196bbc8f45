"""What is printed to be typed, and what is not printed at all."""

import os
import sys
from pathlib import Path

import pytest
from transformers.utils.logging import tqdm

from callbacks.run_summary import render_summary
from trace_pl.commands.shell import program
from trace_pl.models.loading import _bar_after, load_model
from trace_pl.models.names import BUILT_IN_BASE


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """An environment with a program, in the working folder; it is not active."""
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    for name in ("python", "trace-pl", "tensorboard"):
        (scripts / name).write_text("#!/bin/sh\n")
        (scripts / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.chdir(tmp_path)
    return scripts


def test_a_program_of_the_active_environment_is_called_by_its_name(environment, monkeypatch):
    monkeypatch.setenv("PATH", str(environment), prepend=os.pathsep)
    assert program("trace-pl") == "trace-pl"


def test_a_program_of_an_environment_that_is_not_active_is_called_by_its_path(
    environment, monkeypatch
):
    assert program("trace-pl") == ".venv/bin/trace-pl"
    elsewhere = environment.parents[1] / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert program("trace-pl") == str(environment / "trace-pl")


def test_a_program_of_the_same_name_elsewhere_is_not_taken_for_it(environment, monkeypatch):
    other = environment.parents[1] / "other"
    other.mkdir()
    (other / "trace-pl").write_text("#!/bin/sh\n")
    (other / "trace-pl").chmod(0o755)
    monkeypatch.setenv("PATH", str(other), prepend=os.pathsep)
    assert program("trace-pl") == ".venv/bin/trace-pl"


def test_the_commands_of_the_summary_work_as_printed(environment):
    names = ("success_before", "success_after", "tool_turns_before", "tool_turns_after")
    summary = {**dict.fromkeys(names, 0.5), **dict.fromkeys(("questions", "epochs", "updates"), 1)}
    summary |= {"training_seconds": 1.0, "checkpoint": ""}
    lines = render_summary(summary, Path("my runs/version_0")).splitlines()
    assert lines[lines.index("Next:") + 1 :] == [
        "  .venv/bin/tensorboard --logdir 'my runs'",
        "  .venv/bin/trace-pl fit --config 'my runs/version_0/config.yaml' "
        "--credit.anchor callbacks.OutcomeOnly   # the same run with plain GRPO",
    ]


def test_a_model_that_loads_at_once_shows_no_bar(capsys):
    load_model(BUILT_IN_BASE)
    assert capsys.readouterr().err == ""


def test_a_bar_shows_where_loading_takes_longer_than_a_moment(capsys):
    with _bar_after(seconds=0.0):
        assert list(tqdm([1, 2], desc="Loading weights")) == [1, 2]
    assert "Loading weights" in capsys.readouterr().err
    with _bar_after(seconds=60.0):
        assert list(tqdm([1, 2], desc="Loading weights")) == [1, 2]
    assert capsys.readouterr().err == ""
