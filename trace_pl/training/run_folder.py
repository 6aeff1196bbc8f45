"""Where runs leave their files: each new run in a folder of its own, a resumed one in its own."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import DummyLogger

from trace_pl.errors import ConfigError
from trace_pl.privates import has_version, set_version, set_writer

FolderLogger = TensorBoardLogger | CSVLogger
"""Loggers that put each run into a numbered folder below ``root_dir``."""


def run_folder(trainer: lightning.Trainer) -> Path | None:
    """Return the folder of a run's files, None for a run without a logger.

    It is the folder of the first logger that has one; otherwise the one in which Lightning keeps
    checkpoints. What rank 0 says goes for all, so every rank has to ask.
    """
    loggers = [logger for logger in trainer.loggers if not isinstance(logger, DummyLogger)]
    if not loggers:
        return None
    own = folder_loggers(trainer)
    base = Path(loggers[0].save_dir or trainer.default_root_dir)
    folder = (
        folder_of(own[0]) if own else base / str(loggers[0].name) / _folder_name(loggers[0].version)
    )
    return Path(trainer.strategy.broadcast(str(folder)))


def folder_loggers(trainer: lightning.Trainer) -> list[FolderLogger]:
    """Return the loggers of a trainer that have a folder for each run."""
    return [logger for logger in trainer.loggers if isinstance(logger, FolderLogger)]


def folder_of(logger: FolderLogger) -> Path:
    """Return the folder of this run; to ask takes the next free number if none was taken yet."""
    return Path(logger.root_dir) / _folder_name(logger.version)


def _folder_name(version: int | str | None) -> str:
    return version if isinstance(version, str) else f"version_{version}"


# --- new runs -------------------------------------------------------------------------------


def require_unused(loggers: Sequence[FolderLogger]) -> None:
    """Refuse to write a new run over what a folder that was asked for by name holds.

    Raises:
        ConfigError: if it holds something.
    """
    for logger in loggers:
        if not has_version(logger):
            continue
        folder = folder_of(logger)
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(
                f"Expected a new folder for a new run, got '{folder}', which holds another. Change "
                "or leave out the logger's `version`, or go on with that run by --ckpt_path last."
            )


def claim_folders(loggers: Sequence[FolderLogger], command: str) -> None:
    """Make the folders of a run before it starts; they are never those of another.

    Loggers without a version get one number together, the first that is free for all of them, also
    where several runs look for one at once. An evaluation beside a run whose version has a name is
    given that name with its own behind it.

    Args:
        loggers: Loggers of the run.
        command: ``fit``, ``validate``, ``test`` or ``predict``.
    """
    unnamed = [logger for logger in loggers if not has_version(logger)]
    if unnamed:
        first = max(int(logger.version) for logger in unnamed)
        _claim(unnamed, count(first))
    for logger in loggers:
        if logger in unnamed or command == "fit":
            continue
        name = _folder_name(logger.version)
        beside = (f"{name}-{command}" + (f"-{n}" if n else "") for n in count())
        _claim([logger], beside)
    open_tables(loggers)


def _claim(loggers: Sequence[FolderLogger], versions: Iterator[int | str]) -> None:
    roots = {Path(logger.root_dir) for logger in loggers}
    for version in versions:
        if _make_all([root / _folder_name(version) for root in roots]):
            for logger in loggers:
                set_version(logger, version)
            return


def _make_all(folders: Sequence[Path]) -> bool:
    """Make all folders or none of them."""
    made: list[Path] = []
    for folder in folders:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            for other in made:
                other.rmdir()
            return False
        made.append(folder)
    return True


def open_tables(loggers: Sequence[Logger]) -> None:
    """Let CSV loggers begin; Lightning's would delete the table of a run that is resumed.

    Its writer deletes what it finds where it is made, so it is made in an empty folder.
    """
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            folder = folder_of(logger)
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory() as empty:
                writer = ExperimentWriter(empty)
            writer.log_dir = str(folder)
            writer.metrics_file_path = str(folder / writer.NAME_METRICS_FILE)
            table = Path(writer.metrics_file_path)
            if table.is_file():
                with table.open(encoding="utf-8") as file:
                    writer.metrics_keys = file.readline().strip().split(",")
            set_writer(logger, writer)


# --- resumed runs ---------------------------------------------------------------------------


def find_checkpoint(trainer: lightning.Trainer, asked: str) -> Path:
    """Return the checkpoint that ``--ckpt_path`` means: ``last``, or a path.

    Raises:
        ConfigError: if there is none.
    """
    if asked == "last":
        return last_checkpoints(trainer)[0]
    path = Path(asked)
    if not path.exists():
        raise ConfigError(
            f"Expected the path of a checkpoint or `last` for --ckpt_path, got '{asked}', where "
            "nothing is. Look into the `checkpoints` folder of the run."
        )
    return path


def last_checkpoints(trainer: lightning.Trainer) -> list[Path]:
    """Return the last checkpoint of each run in the trainer's folders, the newest first.

    Raises:
        ConfigError: if there is none.
    """
    patterns = _checkpoint_patterns(trainer)
    found = [path for folder, name in patterns for path in folder.glob(f"{name}/*.ckpt")]
    newest = sorted(set(found), key=lambda path: path.lstat().st_mtime, reverse=True)
    last = [path for path in newest if is_last(path)]
    if not last:
        places = " or ".join(f"'{folder / name}/last.ckpt'" for folder, name in patterns)
        got = f"only others, the newest '{newest[0]}'" if newest else "none"
        raise ConfigError(
            f"Expected the last checkpoint of a run at {places}, got {got}. Run once without "
            "--ckpt_path and with ModelCheckpoint's save_last, or give the checkpoint's path."
        )
    return last


def is_last(checkpoint: Path) -> bool:
    """Whether a checkpoint is the last one of its run, by its name."""
    return re.fullmatch(r"last(-v\d+)?\.ckpt", checkpoint.name) is not None


def _checkpoint_patterns(trainer: lightning.Trainer) -> list[tuple[Path, str]]:
    """Return where Lightning may have put checkpoints: folders, and patterns below them."""
    callbacks = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    found = [(Path(c.dirpath), ".") for c in callbacks if c.dirpath]
    for logger in trainer.loggers:
        if isinstance(logger, FolderLogger):
            name = _folder_name(logger.version) if has_version(logger) else "*"
            found.append((Path(logger.root_dir), f"{name}/checkpoints"))
        else:  # to ask some for a name or a version opens a connection
            base = Path(logger.save_dir or trainer.default_root_dir)
            found.append((base, "*/*/checkpoints"))
    if not trainer.loggers:
        found.append((Path(trainer.default_root_dir), "checkpoints"))
    return list(dict.fromkeys(found))


def continue_run(
    loggers: Sequence[FolderLogger], checkpoint: Path, recorded: Sequence[str]
) -> bool:
    """Have the loggers go on in the folders of a run; return whether its folder is theirs.

    Args:
        loggers: Loggers of the run that goes on.
        checkpoint: From which it does.
        recorded: Folders of the loggers that the checkpoint names, used where it lies elsewhere.
    """
    homes = [checkpoint.parent.parent, *map(Path, recorded)]
    if not loggers:
        return True
    is_home = False
    for logger in loggers:
        root = Path(logger.root_dir).resolve()
        for home in homes:
            if home.is_dir() and home.resolve().parent == root:
                if not has_version(logger):
                    set_version(logger, _version(home.name))
                is_home |= folder_of(logger).resolve() == home.resolve()
                break
    return is_home


def _version(name: str) -> int | str:
    number = re.fullmatch(r"version_(\d+)", name)
    return int(number[1]) if number and f"version_{int(number[1])}" == name else name
