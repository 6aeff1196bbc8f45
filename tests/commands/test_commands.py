"""The list of commands, their help, and the configs that are found by name."""

import subprocess
import sys

import pytest
from cli_runner import run_cli

from trace_pl.commands.configs import find_config, shipped_folder, with_config_paths
from trace_pl.errors import ConfigError

HEAVY = ("lightning", "torch", "transformers", "vllm", "tantivy", "matplotlib", "numpy")
SAY_LOADED = f"""
import sys
from trace_pl.commands.main import main
try:
    main()
except SystemExit as stop:
    assert not stop.code
print(sorted(set(sys.modules) & set({HEAVY})), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--help", "commands:"),
        ("", "commands:"),
        ("plan --help", "--tokens-per-trajectory"),
        ("export --help", "--max_shard_size"),
        ("make-base --help", "--recipe.seed"),
        ("configs --help", "options/lora"),
        ("configs", "quickstart"),
    ],
)
def test_help_imports_nothing_that_only_a_run_needs(arguments, words):
    command = [sys.executable, "-c", SAY_LOADED, *arguments.split()]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "[]"
    assert words in result.stdout


def test_the_list_names_every_command(capsys):
    assert run_cli("--help") == 0
    words = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    for name in ("fit", "validate", "test", "predict", "plan", "export", "configs", "make-base"):
        assert words.count(name) == 1


def test_configs_lists_what_is_shipped_with_its_purpose(capsys):
    assert run_cli("configs") == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[-1] == f"in {shipped_folder()}"
    words = {row.split()[0]: row.split()[1:] for row in rows if row.strip()}
    assert " ".join(words["options/lora"]) == "Trains a low-rank adapter"
    assert {"quickstart", "qwen3_4b", "ablations/grpo", "strategy/fsdp"} <= words.keys()
    assert all(purpose for purpose in words.values())


def test_configs_prints_the_one_that_is_named(capsys):
    assert run_cli("configs", "ablations/grpo") == 0
    path = shipped_folder() / "ablations" / "grpo.yaml"
    assert capsys.readouterr().out.rstrip() == path.read_text().rstrip()


@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml", "configs/quickstart.yaml"])
def test_a_shipped_config_is_found_from_any_folder(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    assert find_config(name) == shipped_folder() / "quickstart.yaml"


def test_a_file_of_the_users_own_comes_before_a_shipped_one(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").write_text("seed_everything: 1\n")
    assert find_config("quickstart").resolve() == tmp_path / "quickstart"


def test_names_become_paths_in_every_spelling_of_the_option():
    lora, grpo = (str(shipped_folder() / f"{n}.yaml") for n in ("options/lora", "ablations/grpo"))
    given = ["--config", "options/lora", "--config=ablations/grpo", "-c", "options/lora"]
    assert with_config_paths([*given, "--data.seed", "3"]) == [
        "--config", lora, f"--config={grpo}", "-c", lora, "--data.seed", "3",
    ]  # fmt: skip
    assert with_config_paths(["--config", "{data: {seed: 3}}"]) == ["--config", "{data: {seed: 3}}"]


@pytest.mark.parametrize(
    ("name", "meant"), [("grpo", "`ablations/grpo`"), ("qwen3_4", "`qwen3_4b`")]
)
def test_an_unknown_config_is_refused_with_the_closest_names(name, meant):
    with pytest.raises(ConfigError, match=f"got '{name}'. Did you mean {meant}"):
        find_config(name)


def test_plan_takes_the_names_of_shipped_configs(capsys):
    assert run_cli("plan", "--config", "quickstart") == 0
    assert "GiB" in capsys.readouterr().out
