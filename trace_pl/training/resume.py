"""What a run is, kept beside its files and in its checkpoints, and what may go on from one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
import yaml
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.trainer.states import TrainerFn

from trace_pl.errors import ConfigError
from trace_pl.files import require_writable, write_atomically
from trace_pl.models.checkpoint import read_meta, require_same
from trace_pl.training.datamodule import RolloutDataModule
from trace_pl.training.module import TraceModule
from trace_pl.training.run_folder import (
    continue_run,
    find_checkpoint,
    folder_loggers,
    folder_of,
    is_last,
    last_checkpoints,
    require_unused,
    run_folder,
)
from trace_pl.training.run_identity import Change, describe, differences, identity

_OF_THIS_START = ("ckpt_path", "resume_changes")
"""Options that say how a run starts and are no settings of it."""


class RunRecord(SaveConfigCallback):
    """Saves the config in the run folder, and in each checkpoint what a resumed run is held to.

    The file holds what the user asked for: a run that is started with it is a new run.

    Args:
        parser: Parser of the config.
        config: The parsed config of the command.
        named: Keys that may differ from the checkpoint's, from ``--resume_changes``.
    """

    def __init__(
        self, parser: LightningArgumentParser, config: Namespace, named: Sequence[str] = ()
    ) -> None:
        """Copy the config before anything of it is decided at run time."""
        config = config.clone()
        for name in _OF_THIS_START:
            config.pop(name, None)
        super().__init__(parser, config)
        self.text = parser.dump(config, skip_unset=False)
        self.identity = identity(yaml.safe_load(self.text))
        self.named = tuple(named)
        self.changes: list[dict[str, Any]] = []
        self.is_continued = False

    def setup(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str
    ) -> None:
        """Save the config, if there is a logger and with it a run folder.

        Raises:
            ConfigError: if the folder holds the config of another run.
        """
        folder = run_folder(trainer)
        if folder is None or self.already_saved:
            return
        self.already_saved = True
        path = folder / self.config_filename
        if trainer.strategy.broadcast(path.exists() and not self.is_continued):
            raise ConfigError(
                f"Expected a new folder for a new run, got '{folder}', which holds another. Give "
                "the logger another name or version."
            )
        if trainer.is_global_zero:
            write_atomically(path, self._header() + self.text)

    def on_save_checkpoint(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        """Put into the checkpoint which run it is of, and what was changed on the way."""
        checkpoint["run"] = {
            "settings": self.identity,
            "changes": self.changes,
            "folders": [str(folder_of(logger)) for logger in folder_loggers(trainer)],
        }

    def on_load_checkpoint(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        """Hold the run to the checkpoint's settings, also if Lightning found it by itself."""
        if trainer.state.fn == TrainerFn.FITTING:
            self.accept(checkpoint, "that is loaded")

    def accept(self, saved: Mapping[str, Any], where: object) -> list[Change]:
        """Note and return in what this run differs from a checkpoint's.

        What only one of them knows was not set by anybody else; all other differences have to be
        asked for by name.

        Raises:
            ConfigError: if it differs otherwise.
        """
        if "run" not in saved:
            return []
        changes = differences(saved["run"]["settings"], self.identity)
        real = [change for change in changes if not change.is_one_sided]
        refused = [change for change in real if not change.is_named_by(self.named)]
        if refused:
            slots = ",".join(dict.fromkeys(change.slot for change in real))
            raise ConfigError(
                f"Expected the settings of the checkpoint {where}, got {describe(refused)}. Leave "
                "--ckpt_path out for a new run, or go on with other settings by "
                f"--resume_changes {slots}."
            )
        step = saved["global_step"]
        new = [{"step": step, "key": c.key, "before": c.before, "after": c.after} for c in changes]
        self.changes = [*saved["run"]["changes"], *new]
        return changes

    def _header(self) -> str:
        """Return what was changed on the way, as comments above the config."""
        lines = []
        for change in self.changes:
            words = Change(change["key"], change["before"], change["after"])
            lines.append(f"# From step {change['step']}: {words}.\n")
        return "".join(lines)


def prepare(
    trainer: lightning.Trainer,
    module: TraceModule,
    data: RolloutDataModule,
    record: RunRecord | None,
    command: str,
    asked: str | None,
) -> str | None:
    """Find and check folders and checkpoint of a run before anything heavy starts.

    ``last`` goes on in the folder of the newest run, and so does the path of a run's last
    checkpoint; any other checkpoint begins a new run.

    Args:
        trainer: Trainer of the run.
        module: Its module.
        data: Its data.
        record: What the run is; None for a trial run, which leaves nothing.
        command: ``fit``, ``validate``, ``test`` or ``predict``.
        asked: Value of ``--ckpt_path``.

    Returns:
        The path of the checkpoint, None without one.

    Raises:
        ConfigError: if a folder cannot be written or is another run's, or the checkpoint does not
            exist or is one of other settings.
    """
    loggers = folder_loggers(trainer)
    for logger in loggers:
        require_writable(Path(logger.root_dir), "`trainer.logger.init_args.save_dir`")
    path = None if asked is None else find_checkpoint(trainer, asked)
    saved = {} if path is None else read_meta(path)
    require_same(saved, module.weights_identity)
    if command != "fit":
        return None if path is None else str(path)
    is_continued = False
    if path is not None:
        _require_training(saved, path, trainer.max_epochs)
        if record is not None:
            _accept(record, saved, path, module, data, trainer)
        recorded = saved.get("run", {}).get("folders", ())
        is_continued = is_last(path) and continue_run(loggers, path, recorded)
    if not is_continued and trainer.is_global_zero:
        require_unused(loggers)
    if record is not None:
        record.is_continued = is_continued
    return None if path is None else str(path)


def _require_training(saved: Mapping[str, Any], path: Path, max_epochs: int | None) -> None:
    if path.is_file() and "optimizer_states" not in saved:
        raise ConfigError(
            f"Expected a checkpoint with the optimizer to train on from, got '{path}', which holds "
            "weights alone. Take another, or export it and set model.model_name to the folder."
        )
    if max_epochs is not None and -1 < max_epochs <= saved["epoch"]:
        raise ConfigError(
            f"Expected trainer.max_epochs of at least the epochs of the checkpoint '{path}' "
            f"({saved['epoch'] + 1}), got {max_epochs}. Raise it."
        )


def _accept(
    record: RunRecord,
    saved: Mapping[str, Any],
    path: Path,
    module: TraceModule,
    data: RolloutDataModule,
    trainer: lightning.Trainer,
) -> None:
    """Hold a run to the checkpoint's settings, and say what differs because it was asked for."""
    if "run" not in saved and trainer.is_global_zero:
        print(
            f"The checkpoint '{path}' is of an earlier version and does not say which settings it "
            "was trained with: only model, adapter, reference and questions are compared.",
            file=sys.stderr,
        )
    try:
        changes = record.accept(saved, f"'{path}'")
    except ConfigError as error:
        other = _newest_of_same_run(record, trainer)
        hint = f" The newest run with these settings: --ckpt_path {other}." if other else ""
        raise ConfigError(f"{error}{hint}") from None
    module.restarts_optimizer = any(
        change.is_named_by(["model.optimizer", "model.scheduler"]) for change in changes
    )
    module.may_change_reference = any(c.is_named_by(["model.reference_name"]) for c in changes)
    data.restarts_questions = any(change.is_named_by(["data.task"]) for change in changes)
    if changes and trainer.is_global_zero:
        print(f"Going on from '{path}' with {describe(changes)}.")
        if module.restarts_optimizer:
            print("Optimizer and scheduler begin anew.")
        if data.restarts_questions:
            print("The order of questions begins anew.")


def _newest_of_same_run(record: RunRecord, trainer: lightning.Trainer) -> Path | None:
    try:
        candidates = last_checkpoints(trainer)
    except ConfigError:
        return None
    for path in candidates:
        try:
            saved = read_meta(path).get("run")
        except ConfigError:  # one that cannot be read is no hint
            continue
        if saved and not differences(saved["settings"], record.identity):
            return path
    return None
