from pathlib import Path

import pytest
import yaml
from cli_runner import run_cli

from trace_pl.cli import TraceCLI
from trace_pl.datamodule import RolloutDataModule
from trace_pl.module import TraceModule

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
RUNS = sorted(CONFIGS.glob("*.yaml"))
STRATEGIES = sorted((CONFIGS / "strategy").iterdir())
OVERLAYS = sorted(
    path for folder in ("ablations", "options") for path in (CONFIGS / folder).iterdir()
)


def resolved(capsys, *arguments: str) -> dict:
    assert run_cli("fit", "--config", str(QUICKSTART), *arguments, "--print_config") == 0
    return yaml.safe_load(capsys.readouterr().out)


def differing_keys(one, other, prefix=""):
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return set() if one == other else {prefix}
    return {
        key
        for name in one.keys() | other.keys()
        for key in differing_keys(one.get(name), other.get(name), f"{prefix}.{name}".strip("."))
    }


def test_the_quickstart_instantiates_stage_by_stage(tmp_path):
    cli = TraceCLI(
        TraceModule,
        RolloutDataModule,
        run=False,
        args=["--config", str(QUICKSTART), f"--trainer.logger.init_args.save_dir={tmp_path}"],
        auto_configure_optimizers=False,
        save_config_callback=None,
    )
    names = [type(callback).__name__ for callback in cli.trainer.callbacks]
    for stage in ("ToolCallSegmenter", "FrozenReferenceProber", "KStepTD", "TraceAnchor"):
        assert names.count(stage) == 1
    assert cli.datamodule.model_name == cli.model.model_name == "closed-web-base"


def test_print_config_round_trips(capsys, tmp_path):
    first = resolved(capsys)
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(first))
    assert run_cli("fit", "--config", str(path), "--print_config") == 0
    assert yaml.safe_load(capsys.readouterr().out) == first


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.stem)
def test_an_overlay_differs_from_its_base_in_exactly_its_slot(capsys, path):
    if path.stem == "adamw_8bit":
        pytest.importorskip("torchao")
    changed = differing_keys(resolved(capsys), resolved(capsys, "--config", str(path)))
    named = {
        f"{section}.{slot}"
        for section, slots in yaml.safe_load(path.read_text()).items()
        for slot in slots
    }
    assert {".".join(key.split(".")[:2]) for key in changed} == named
    # GSPO is outcome-only credit and a loss of its own.
    assert len(named) == (2 if path.stem == "gspo" else 1)


@pytest.mark.parametrize("path", STRATEGIES, ids=lambda path: path.stem)
def test_a_strategy_changes_where_a_run_runs_and_nothing_else(capsys, path):
    changed = differing_keys(resolved(capsys), resolved(capsys, "--config", str(path)))
    where = {"trainer.strategy", "trainer.devices", "trainer.num_nodes"}
    assert {".".join(key.split(".")[:2]) for key in changed} <= where


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_complete_run_instantiates_with_a_small_model(path, tmp_path):
    overrides = (
        "--model.model_name=closed-web-base",
        "--trainer.devices=1",
        f"--trainer.logger.init_args.save_dir={tmp_path}",
    )
    cli = TraceCLI(
        TraceModule,
        RolloutDataModule,
        run=False,
        args=["--config", str(path), *overrides],
        auto_configure_optimizers=False,
        save_config_callback=None,
    )
    assert cli.datamodule.plan.takes_one_step == (path != QUICKSTART)
    assert cli.datamodule.group_size * cli.datamodule.questions_per_epoch == 128


def test_a_loss_of_another_class_keeps_nothing_of_the_clip_it_replaces(capsys):
    loss = resolved(capsys, "--config", str(CONFIGS / "ablations" / "gspo.yaml"))["model"]["loss"]
    assert loss["class_path"] == "trace_pl.losses.SequenceClip"
    assert (loss["init_args"]["clip_low"], loss["init_args"]["clip_high"]) == (3e-4, 4e-4)


def test_a_slot_refuses_a_class_of_another_stage(capsys):
    wrong = ("--credit.backup", "callbacks.OutcomeOnly")
    assert run_cli("fit", "--config", str(QUICKSTART), *wrong) == 2
    assert "Backup" in capsys.readouterr().err


def test_an_unknown_key_is_refused(capsys):
    assert run_cli("fit", "--config", str(QUICKSTART), "--data.group_sise", "8") == 2
    assert "group_sise" in capsys.readouterr().err


def test_a_run_without_a_logger_leaves_no_config_in_the_working_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = ["--config", str(QUICKSTART), "--trainer.logger=false", "--trainer.callbacks=null"]
    arguments += ["--data.evaluation_questions=2", "--data.engine.init_args.kv_cache_gib=0.1"]
    assert run_cli("validate", *arguments) == 0
    assert list(tmp_path.iterdir()) == []
