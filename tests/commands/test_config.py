import logging
from pathlib import Path

import pytest
import yaml
from cli_runner import run_cli
from lightning.pytorch.callbacks import ModelCheckpoint
from parsed import parsed, parser

from callbacks import HealthMonitor
from callbacks.rollout_alarms import FlatGroups
from trace_pl.commands.cli import TraceCLI, newest
from trace_pl.errors import ConfigError
from trace_pl.privates import subcommands_of
from trace_pl.training.datamodule import RolloutDataModule
from trace_pl.training.module import TraceModule

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
RUNS = sorted(CONFIGS.glob("*.yaml"))


def resolved(capsys, *arguments: str) -> dict:
    assert run_cli("fit", "--config", str(QUICKSTART), *arguments, "--print_config") == 0
    return yaml.safe_load(capsys.readouterr().out)


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
    assert cli.datamodule.agent.model_name == cli.model.model_name == "closed-web-base"


def test_the_parser_of_the_command_that_is_asked_for_is_made_alone(monkeypatch):
    made = []

    def parse(cli, parser, args):
        made.extend(subcommands_of(parser))
        raise ConfigError("enough")

    monkeypatch.setattr(TraceCLI, "parse_arguments", parse)
    assert run_cli("fit", "--config", str(QUICKSTART)) == 2
    assert made == ["fit"]


def test_print_config_round_trips(capsys, tmp_path):
    first = resolved(capsys)
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(first))
    assert run_cli("fit", "--config", str(path), "--print_config") == 0
    assert yaml.safe_load(capsys.readouterr().out) == first


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
    plan = cli.datamodule.epoch_plan
    assert plan.group_size * plan.questions_per_epoch == 128
    # The built-in model was taught its answers; whoever was not is told.
    answer_format = cli.datamodule.agent.answer_format
    assert (answer_format.opening in answer_format.instruction) == (path != QUICKSTART)


def test_a_slot_refuses_a_class_of_another_stage(capsys):
    wrong = ("--credit.backup", "callbacks.OutcomeOnly")
    assert run_cli("fit", "--config", str(QUICKSTART), *wrong) == 2
    assert "Backup" in capsys.readouterr().err


def test_an_unknown_key_is_refused(capsys):
    assert run_cli("fit", "--config", str(QUICKSTART), "--data.group_sise", "8") == 2
    assert "group_sise" in capsys.readouterr().err


def test_a_run_without_a_logger_leaves_no_config_and_praises_no_other_package(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    log.addHandler(handler)
    arguments = ["--config", str(QUICKSTART), "--trainer.logger=false", "--trainer.callbacks=null"]
    arguments += ["--data.evaluation_questions=2", "--data.engine.init_args.kv_cache_gib=0.1"]
    try:
        assert run_cli("validate", *arguments) == 0
    finally:
        log.removeHandler(handler)
    assert list(tmp_path.iterdir()) == []
    assert any("GPU available" in line for line in told)
    assert not any("Tip" in line for line in told)
    assert "Loading weights" not in capsys.readouterr().err


def test_slots_of_the_data_take_bare_names(capsys):
    config = resolved(
        capsys,
        "--data.call_format=XmlFormat",
        "--data.task=ClosedWebTask",
        "--data.engine=HFEngine",
        "--data.reward=ExactMatchReward",
        "--data.reward.format_bonus=0.1",
    )
    assert config["data"]["call_format"]["class_path"].endswith(".XmlFormat")
    assert config["data"]["task"]["class_path"].endswith(".ClosedWebTask")
    assert config["data"]["engine"]["class_path"].endswith(".HFEngine")
    assert config["data"]["reward"]["class_path"].endswith(".ExactMatchReward")
    assert config["data"]["reward"]["init_args"] == {"format_bonus": 0.1}


def test_a_callback_of_a_config_is_changed_by_giving_it_again():
    again = ["--trainer.callbacks+=HealthMonitor", "--trainer.callbacks.flat_patience=7"]
    config = parsed(f"--config={QUICKSTART}", *again)
    config = parser().instantiate_classes(config)
    kept = newest(config["trainer"]["callbacks"])
    (monitor,) = (each for each in kept if isinstance(each, HealthMonitor))
    assert FlatGroups(epochs=7) in monitor.alarms
    assert [type(each).__name__ for each in kept] == [
        "ModelCheckpoint", "RunSummary", "ValueCurve", "RolloutSamples", "RolloutWriter",
        "HealthMonitor",
    ]  # fmt: skip


def test_callbacks_of_other_packages_may_be_there_twice():
    twice = [ModelCheckpoint(), ModelCheckpoint(monitor="reward")]
    assert newest(twice) == twice
