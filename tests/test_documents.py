"""Every command and snippet of README, docs and configs, as it is written but small.

Runs that need GPUs are parsed, and the text has to say so; what takes minutes is looked up.
"""

import json
import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from cli_runner import run_cli
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TEXTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "configs").rglob("*.yaml")),
]
SMALL = (
    "--data.engine=trace_pl.engines.HFEngine",
    "--data.engine.max_model_len=1024",
    "--data.questions_per_epoch=2",
    "--data.group_size=2",
    "--data.evaluation_questions=2",
    "--data.test_questions=2",
    "--data.limits.max_turns=2",
    "--trainer.accelerator=cpu",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.max_epochs=1",
    "--trainer.enable_progress_bar=false",
)
PROGRAMS = ("trace-pl", "make", "python", "pip", "tensorboard")


def commands(path):
    """Yield the commands in a text's blocks, comments and backticks, each with what is near it."""
    text = re.sub(r"\\\n#? *", " ", path.read_text())
    for paragraph in re.split(r"\n#?\s*\n", text):
        for line in paragraph.splitlines():
            block = re.fullmatch(r"(?:#? {2,})(\S.*)", line)
            for shown in [block[1]] if block else re.findall(r"`([^`]+)`", line):
                if shown.split()[0] in PROGRAMS and "..." not in shown:
                    yield shlex.split(shown.split(" > ")[0], comments=True), paragraph


def shown():
    """Return each command once, with its paragraph; first what resumes the newest run."""
    found = {}
    for path in TEXTS:
        for words, paragraph in commands(path):
            found.setdefault(tuple(words), paragraph)
    ordered = sorted(found.items(), key=lambda item: "--ckpt_path" not in item[0])
    return [pytest.param(*item, id=" ".join(item[0])[:80]) for item in ordered]


def snippets(language):
    """Return name and text of the files that README shows."""
    return re.findall(rf"```{language}\n# ([\w.]+)[^\n]*\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder in which README has been followed: its files are written, the quickstart has run."""
    folder = tmp_path_factory.mktemp("workspace")
    (folder / "configs").symlink_to(ROOT / "configs")
    for name, text in snippets("python") + snippets("yaml"):
        (folder / name).write_text(text)
    (folder / "data").mkdir()
    question, page = (json.loads(row) for row in re.findall(r'^    (\{"id": .*\})$', README, re.M))
    question |= {"answer": "Arden", "answer_aliases": []}
    page |= {"title": "Arden", "text": "Arden is a town."}
    for name, row, count in (
        ("train", question, 2),
        ("validation", question, 2),
        ("corpus", page, 1),
    ):
        rows = [json.dumps({**row, "id": f"{name}{number}"}) for number in range(count)]
        (folder / "data" / f"{name}.jsonl").write_text("\n".join(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        first = ("--trainer.num_sanity_val_steps=-1",)  # what README says of validation is there
        assert run_cli("fit", "--config", "quickstart", *SMALL, *first) == 0
    return folder


@pytest.mark.parametrize(("words", "paragraph"), shown())
def test_a_command_works_as_it_is_written(words, paragraph, workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    monkeypatch.syspath_prepend(str(workspace))
    program, first = (*words, "")[:2]
    if program == "make":
        assert not first or re.search(rf"^{first}:", (ROOT / "Makefile").read_text(), re.M)
    elif program == "tensorboard":
        assert list(Path(words[-1]).rglob("events*"))
    elif program == "pip":
        check_extra(words[-1])
    elif program == "python":
        check_script(words[1:])
    elif first in ("fit", "validate", "test", "predict"):
        check_run([*words[1:]], paragraph)
    elif first == "doctor":
        check_doctor(words[2:], paragraph)
    elif first == "export":
        trained = next(Path("runs").rglob("last.ckpt"))
        assert run_cli("export", str(trained), *words[3:]) == 0
    elif first == "plan":
        config = () if "--config" in words else ("--config", "quickstart")
        assert run_cli(*words[1:], *config) in (0, 1)  # 1: it does not fit
    elif first != "make-base":  # which takes minutes and has a test of its own
        assert run_cli(*words[1:]) == 0


def check_run(words, paragraph):
    if any(name in word for word in words for name in ("qwen3", "strategy/", "search_agent")):
        assert re.search(r"GPU|node", paragraph), "the text says what it needs"
        assert run_cli(*words, "--print_config") == 0
    elif "--print_config" in words:
        assert run_cli(*words) == 0
    else:
        config = () if "--config" in words else ("--config", "quickstart")
        assert run_cli(*words, *config, *SMALL) == 0


def check_doctor(words, paragraph):
    if words:
        assert "GPU" in paragraph, "the text says what it needs"
        assert run_cli("fit", *words, "--print_config") == 0
    else:
        assert run_cli("doctor") == 0


def check_extra(requirement):
    name, _, extras = requirement.rstrip("]").partition("[")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if extras:
        assert name == project["name"]
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


def check_script(words):
    if words[0] == "-m":
        script = ROOT / f"{words[1].replace('.', '/')}.py"
    else:
        script = ROOT / words[0]
        text = script.read_text()
        assert all(word in text for word in words[1:] if word.startswith("--"))
    assert script.is_file()


def test_the_run_with_data_of_ones_own_trains(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    run = ["fit", "--config", "search_agent", "--config", "my_run.yaml", *SMALL]
    run += ["--model.model_name=closed-web-base", "--data.answer_format.init_args.instruction="]
    run += ["--data.limits.max_trajectory_tokens=800", "--data.limits.max_response_tokens=64"]
    assert run_cli(*run) == 0
    summary = json.loads(Path("runs/search_agent/version_0/summary.json").read_text())
    assert (summary["questions"], summary["updates"]) == (2, 1)


def test_the_tags_that_readme_explains_are_logged(workspace):
    events = EventAccumulator(str(workspace / "runs" / "quickstart" / "version_0")).Reload().Tags()
    texts = [tag.removesuffix("/text_summary") for tag in events["tensors"]]
    logged = [*events["scalars"], *events["images"], *texts]
    rows = README[README.index("| tag |") :].split("\n\n")[0].splitlines()[2:]
    tags = {tag for row in rows for tag in re.findall(r"`([^`]+)`", row.split("|")[1])}
    assert len(tags) > 15
    # A small run of a dense model has no experts, and may have no answer that is right.
    for tag in tags - {"experts/*", "loss/expert_balance", "credit/value_outcome_correlation"}:
        assert any(fnmatch(name, tag) for name in logged), tag
