import os
import time

import lightning
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from trace_pl.errors import ConfigError
from trace_pl.training import run_folder as run_folders
from trace_pl.training.run_folder import (
    claim_folders,
    continue_run,
    find_checkpoint,
    folder_loggers,
    folder_of,
    open_tables,
    require_unused,
    run_folder,
)


class Elsewhere(Logger):
    """Keeps nothing on this machine."""

    name, version = "remote", "a1"

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params):
        pass


def trainer(root, logger, *callbacks, **settings):
    return lightning.Trainer(
        accelerator="cpu",
        logger=logger,
        callbacks=list(callbacks),
        default_root_dir=root,
        enable_progress_bar=False,
        **settings,
    )


def checkpoint(path, age_s=0.0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (time.time() - age_s,) * 2)
    return path


LOGGERS = {
    "tensorboard": lambda root: TensorBoardLogger(root / "runs", name="a"),
    "csv": lambda root: CSVLogger(root / "runs", name="a"),
    "both": lambda root: [TensorBoardLogger(root / "runs", "a"), CSVLogger(root / "runs", "a")],
    "remote first": lambda root: [Elsewhere(), CSVLogger(root / "runs", name="a")],
}


@pytest.mark.parametrize("name", LOGGERS)
def test_last_is_the_newest_run_and_all_loggers_go_on_in_its_folder(tmp_path, name):
    old, new, evaluation = (tmp_path / "runs" / "a" / f"version_{n}" for n in range(3))
    checkpoint(old / "checkpoints" / "last.ckpt", age_s=60.0)
    newest = checkpoint(new / "checkpoints" / "last.ckpt")
    evaluation.mkdir()
    of = trainer(tmp_path, LOGGERS[name](tmp_path))
    assert find_checkpoint(of, "last") == newest
    assert continue_run(folder_loggers(of), newest, [])
    assert {folder_of(logger) for logger in folder_loggers(of)} == {new}
    assert run_folder(of) == new


def test_a_logger_without_a_folder_has_its_checkpoints_found(tmp_path):
    of = trainer(tmp_path, Elsewhere())
    path = checkpoint(tmp_path / "remote" / "a1" / "checkpoints" / "last.ckpt")
    assert find_checkpoint(of, "last") == path
    assert run_folder(of) == tmp_path / "remote" / "a1"


@pytest.mark.parametrize("logger", [True, None])
def test_the_default_logger_has_its_checkpoints_found(tmp_path, logger):
    path = checkpoint(tmp_path / "lightning_logs" / "version_3" / "checkpoints" / "last.ckpt")
    assert find_checkpoint(trainer(tmp_path, logger), "last") == path


def test_without_a_logger_checkpoints_are_found_and_there_is_no_run_folder(tmp_path):
    of = trainer(tmp_path, False)
    path = checkpoint(tmp_path / "checkpoints" / "last-v1.ckpt")
    assert find_checkpoint(of, "last") == path
    assert run_folder(of) is None


def test_an_empty_name_puts_runs_straight_below_the_folder(tmp_path):
    path = checkpoint(tmp_path / "runs" / "version_0" / "checkpoints" / "last.ckpt")
    checkpoint(tmp_path / "runs" / "other" / "version_0" / "checkpoints" / "last.ckpt")
    of = trainer(tmp_path, TensorBoardLogger(tmp_path / "runs", name=""))
    assert find_checkpoint(of, "last") == path


def test_a_version_that_was_asked_for_is_the_only_place_to_look(tmp_path):
    root = tmp_path / "runs" / "a"
    path = checkpoint(root / "mine" / "checkpoints" / "last.ckpt", age_s=60.0)
    checkpoint(root / "version_0" / "checkpoints" / "last.ckpt")
    of = trainer(tmp_path, TensorBoardLogger(tmp_path / "runs", name="a", version="mine"))
    assert find_checkpoint(of, "last") == path
    assert continue_run(folder_loggers(of), path, [])


def test_checkpoints_in_a_folder_of_their_own_lead_back_to_the_run(tmp_path):
    path = checkpoint(tmp_path / "kept" / "last.ckpt")
    home = tmp_path / "runs" / "a" / "version_4"
    home.mkdir(parents=True)
    of = trainer(
        tmp_path, LOGGERS["both"](tmp_path), ModelCheckpoint(tmp_path / "kept", save_last=True)
    )
    assert find_checkpoint(of, "last") == path
    assert continue_run(folder_loggers(of), path, [str(home), str(home)])
    assert [folder_of(logger) for logger in folder_loggers(of)] == [home, home]


def test_the_checkpoint_of_another_folder_does_not_lead_into_one_of_ours(tmp_path):
    path = checkpoint(tmp_path / "runs" / "b" / "version_0" / "checkpoints" / "last.ckpt")
    (tmp_path / "runs" / "a" / "version_0").mkdir(parents=True)
    loggers = [TensorBoardLogger(tmp_path / "runs", name="a")]
    assert not continue_run(loggers, path, [str(path.parents[1])])
    assert folder_of(loggers[0]).name == "version_1"


@pytest.mark.parametrize("asked", ["last", "best", "hpc", "registry:a/b", "no/such.ckpt"])
def test_what_is_not_there_is_refused(tmp_path, asked):
    with pytest.raises(ConfigError, match=r"Expected .*checkpoint.*--ckpt_path"):
        find_checkpoint(trainer(tmp_path, LOGGERS["both"](tmp_path)), asked)


def test_without_a_last_checkpoint_the_newest_other_is_named(tmp_path):
    other = tmp_path / "runs" / "a" / "version_0" / "checkpoints" / "epoch=1-step=4.ckpt"
    checkpoint(other)
    with pytest.raises(ConfigError, match=r"epoch=1-step=4\.ckpt.*save_last"):
        find_checkpoint(trainer(tmp_path, LOGGERS["csv"](tmp_path)), "last")


# --- new runs -------------------------------------------------------------------------------


def test_loggers_of_a_run_take_one_number_that_is_free_for_all(tmp_path):
    (tmp_path / "csv" / "version_1").mkdir(parents=True)
    loggers = [
        TensorBoardLogger(tmp_path / "a", name=""),
        CSVLogger(tmp_path / "a", name=""),
        CSVLogger(tmp_path / "csv", name=""),
    ]
    claim_folders(loggers, "fit")
    assert [str(folder_of(logger).relative_to(tmp_path)) for logger in loggers] == [
        "a/version_2",
        "a/version_2",
        "csv/version_2",
    ]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["version_2"]


def test_a_number_that_another_run_took_meanwhile_is_passed_over(tmp_path):
    loggers = [TensorBoardLogger(tmp_path, name=name) for name in ("a", "b")]
    assert max(logger._get_next_version() for logger in loggers) == 0
    loggers[0]._get_next_version = lambda: 0
    (tmp_path / "b" / "version_0").mkdir(parents=True)
    loggers[1]._get_next_version = lambda: 0
    claim_folders(loggers, "fit")
    assert [logger.version for logger in loggers] == [1, 1]
    assert not (tmp_path / "a" / "version_0").exists()


@pytest.mark.parametrize("version", ["mine", 3])
def test_a_version_by_name_is_never_written_over(tmp_path, version):
    loggers = [CSVLogger(tmp_path, name="a", version=version)]
    require_unused(loggers)
    claim_folders(loggers, "fit")
    (folder_of(loggers[0]) / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"Expected a new folder.*version"):
        require_unused(loggers)


def test_evaluations_of_a_named_run_stand_beside_it(tmp_path):
    for expected in ("mine-test", "mine-test-1"):
        (tmp_path / "mine").mkdir(exist_ok=True)
        loggers = [CSVLogger(tmp_path, name="", version="mine")]
        claim_folders(loggers, "test")
        assert loggers[0].version == expected


def test_a_table_goes_on_where_it_stopped(tmp_path, recwarn):
    for number in (0, 1):
        logger = CSVLogger(tmp_path, name="", version="mine")
        claim_folders([logger], "fit")
        logger.log_metrics({"loss": float(number), f"only_{number}": 1.0}, step=number)
        logger.save()
    rows = (tmp_path / "mine" / "metrics.csv").read_text().splitlines()
    assert rows == ["loss,only_0,only_1,step", "0.0,1.0,,0", "1.0,,1.0,1"]
    assert not [w for w in recwarn if "will be deleted" in str(w.message)]
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["metrics.csv"]


def test_a_table_stays_where_it_is_while_its_logger_begins(tmp_path, monkeypatch):
    table = tmp_path / "a" / "metrics.csv"
    table.parent.mkdir()
    table.write_text("step\n1\n")
    found = []

    class Watched(ExperimentWriter):
        def __init__(self, log_dir):
            super().__init__(log_dir)
            found.append((table.read_text(), [each.name for each in table.parent.iterdir()]))

    monkeypatch.setattr(run_folders, "ExperimentWriter", Watched)
    open_tables([CSVLogger(tmp_path, name="", version="a")])
    assert found == [("step\n1\n", ["metrics.csv"])]
    assert table.read_text() == "step\n1\n"
