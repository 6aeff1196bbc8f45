import json
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

from trace_pl.errors import ConfigError, DataError
from trace_pl.tasks.file_task import FileTask
from trace_pl.tasks.protocol import Task
from trace_pl.tools.browser import Browser
from trace_pl.tools.guards import AllowAll, SeenWordsGuard
from trace_pl.tools.index import Bm25Index
from trace_pl.tools.stored_index import StoredBm25Index

FILE_TASK = "trace_pl.tasks.FileTask"
PAGES = [{"id": f"d{n}", "title": f"Page {n}", "text": f"A tower of {n} floors."} for n in range(9)]


def rows(split: str, count: int = 2) -> list[dict]:
    return [
        {"id": f"{split}{n}", "question": "Which tower?", "answer": "Arden"} for n in range(count)
    ]


@pytest.fixture
def files(tmp_path, monkeypatch) -> dict[str, str]:
    """A corpus and two splits, as the arguments of a task."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    contents = {"corpus": PAGES, "train": rows("t"), "validation": rows("v", 3)}
    paths = {}
    for name, lines in contents.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        paths[name] = str(path)
    return paths


def from_yaml(path: Path, settings: dict) -> FileTask:
    """Make the task as the command line makes it."""
    task = {"class_path": FILE_TASK, "init_args": settings}
    path.write_text(yaml.safe_dump({"task": task}))
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--task", type=Task)
    return parser.instantiate(parser.parse_args(["--config", str(path)])).task


def test_every_setting_of_browser_guard_and_index_is_reached_from_a_config(tmp_path, files):
    browser = {"num_results": 5, "snippet_words": 9, "max_words": 70, "num_passages": 2}
    guard = {"class_path": "trace_pl.tools.SeenWordsGuard"}
    task = from_yaml(
        tmp_path / "run.yaml",
        {
            **files,
            "index": {
                "class_path": "trace_pl.tools.StoredBm25Index",
                "init_args": {"folder": str(tmp_path / "indexes")},
            },
            "browser": {
                "class_path": "trace_pl.tools.Browser",
                "init_args": {**browser, "guard": guard},
            },
        },
    )
    tools = task.toolbox()
    assert {name: getattr(tools, name) for name in browser} == browser
    assert isinstance(tools.guard, SeenWordsGuard)
    assert list((tmp_path / "indexes").glob("bm25-*/trace_pl.json"))
    assert len(tools.index.search("tower", 9)) == 9


def test_a_class_without_settings_is_named_alone(tmp_path, files):
    settings = {**files, "index": "trace_pl.tools.Bm25Index"}
    task = from_yaml(tmp_path / "run.yaml", settings)
    assert type(task.toolbox().index) is Bm25Index
    guarded = {**settings, "browser.init_args.guard": "SeenWordsGuard"}
    arguments = [f"--task.{name}={value}" for name, value in guarded.items()]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--task", type=Task)
    task = parser.instantiate(parser.parse_args([f"--task={FILE_TASK}", *arguments])).task
    assert type(task.toolbox().guard) is SeenWordsGuard
    assert not (tmp_path / "cache").exists()


def test_by_default_every_query_is_allowed_and_the_index_is_kept_in_the_cache(tmp_path, files):
    for tools in (FileTask(**files).toolbox(), from_yaml(tmp_path / "r", files).toolbox()):
        assert type(tools) is Browser
        assert type(tools.guard) is AllowAll
        assert type(tools.index) is StoredBm25Index
        assert len(list((tmp_path / "cache" / "trace_pl" / "indexes").glob("bm25-*/"))) == 1


@pytest.mark.parametrize(
    ("slot", "class_path", "wrong", "message"),
    [
        ("browser", "trace_pl.tools.Browser", {"num_results": 0}, "num_results of at"),
        ("browser", "trace_pl.tools.Browser", {"num_passages": 0}, "num_passages of at"),
        (
            "index",
            "trace_pl.tools.StoredBm25Index",
            {"folder": "/dev/null"},
            "folder for search indexes at '/dev/null'",
        ),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(tmp_path, files, slot, class_path, wrong, message):
    chosen = {"class_path": class_path, "init_args": wrong}
    with pytest.raises(ConfigError, match=message) as caught:
        from_yaml(tmp_path / "run.yaml", {**files, slot: chosen}).toolbox()
    assert "\n" not in str(caught.value)


def test_a_test_split_is_that_of_validation_unless_it_is_named(files):
    task = FileTask(**files)
    assert task.questions("test") == task.questions("validation")
    assert [question.id for question in FileTask(**files, test=files["train"]).questions("train")]


def test_questions_that_are_trained_on_are_refused_elsewhere(files):
    with pytest.raises(DataError, match=r"validation questions apart .* \['t0', 't1'\]"):
        FileTask(files["train"], files["train"], corpus=files["corpus"]).questions("validation")


def test_a_test_file_with_a_fault_is_refused_before_training(files, tmp_path):
    with pytest.raises(ConfigError, match=r"JSONL file at .*missing\.jsonl"):
        FileTask(**files, test=str(tmp_path / "missing.jsonl")).questions("train")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"id": "q1"}\n')
    with pytest.raises(DataError, match=r"broken\.jsonl:1"):
        FileTask(**files, test=str(broken)).questions("train")
