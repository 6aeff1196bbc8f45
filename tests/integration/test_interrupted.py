"""Runs that are stopped, run out of space or run beside each other leave nothing half done."""

import os
import resource
import signal
from pathlib import Path

import processes
import pytest
import torch

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "fit",
    f"--config={ROOT / 'configs' / 'quickstart.yaml'}",
    "--data.engine=trace_pl.engines.HFEngine",
    "--data.engine.max_model_len=1024",
    "--data.questions_per_epoch=2",
    "--data.group_size=2",
    "--data.evaluation_questions=2",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.enable_progress_bar=false",
)


def start(runs: Path, *more: str) -> processes.Run:
    return processes.start(*SETTINGS, f"--trainer.logger.init_args.save_dir={runs}", *more)


def checkpoint(runs: Path, version: int = 0) -> Path:
    return runs / "quickstart" / f"version_{version}" / "checkpoints" / "last.ckpt"


def hidden(runs: Path) -> list[str]:
    return [path.name for path in runs.rglob("*") if path.name.startswith(".")]


def test_a_full_disk_is_one_clear_error_and_the_run_goes_on_afterwards(tmp_path):
    start(tmp_path, "--trainer.max_epochs=1").finish()
    path = checkpoint(tmp_path)
    more = ("--trainer.max_epochs=2", "--ckpt_path=last")
    run = start(tmp_path, *more)
    largest = path.stat().st_size // 2  # of any file that it writes; Python ignores the signal
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (largest, largest))
    errors = run.finish(code=2)
    assert f"Expected to write a checkpoint to '{path.parent}" in errors
    assert "Traceback" not in errors
    assert torch.load(path, weights_only=True)["global_step"] == 2  # as it was
    assert hidden(tmp_path) == []
    start(tmp_path, *more).finish()
    assert torch.load(path, weights_only=True)["global_step"] == 4


def test_an_interrupt_ends_a_run_and_keeps_its_checkpoint(tmp_path):
    run = start(tmp_path, "--trainer.max_epochs=1000")
    path = checkpoint(tmp_path)
    run.wait_for(path.exists)
    run.send_signal(signal.SIGINT)
    run.finish(code=1)
    assert torch.load(path, weights_only=True)["epoch"] >= 0
    assert hidden(tmp_path) == []
    with pytest.raises(ProcessLookupError):  # nobody of its process group is left
        os.killpg(run.pid, 0)


def test_two_runs_at_once_take_two_folders(tmp_path):
    runs = [start(tmp_path, "--trainer.max_epochs=1") for _ in range(2)]
    for run in runs:
        run.finish()
    for version in range(2):
        saved = torch.load(checkpoint(tmp_path, version), weights_only=True)
        assert saved["global_step"] == 2
        assert len(list((tmp_path / "quickstart" / f"version_{version}").glob("events*"))) == 1
