"""Runs that are stopped, run out of space or run beside each other leave nothing half done."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(300)


def start(runs: Path, *more: str, largest_file: int | None = None) -> subprocess.Popen:
    """Start a small run; no file of it may grow larger than ``largest_file`` bytes."""

    def limit() -> None:
        if largest_file is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    settings = (
        f"--config={ROOT / 'configs' / 'quickstart.yaml'}",
        f"--trainer.logger.init_args.save_dir={runs}",
        "--data.engine=trace_pl.rollout.hf_engine.HFEngine",
        "--data.engine.max_model_len=1024",
        "--data.questions_per_epoch=2",
        "--data.group_size=2",
        "--data.evaluation_questions=2",
        "--trainer.num_sanity_val_steps=0",
        "--trainer.enable_progress_bar=false",
    )
    return subprocess.Popen(
        [sys.executable, "-m", "trace_pl.cli", "fit", *settings, *more],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, code: int = 0) -> str:
    _, errors = process.communicate(timeout=200)
    assert process.returncode == code, errors[-3000:]
    return errors


def checkpoint(runs: Path, version: int = 0) -> Path:
    return runs / "quickstart" / f"version_{version}" / "checkpoints" / "last.ckpt"


def hidden(runs: Path) -> list[str]:
    return [path.name for path in runs.rglob("*") if path.name.startswith(".")]


def test_a_full_disk_is_one_clear_error_and_the_run_goes_on_afterwards(tmp_path):
    finish(start(tmp_path, "--trainer.max_epochs=1"))
    path = checkpoint(tmp_path)
    more = ("--trainer.max_epochs=2", "--ckpt_path=last")
    errors = finish(start(tmp_path, *more, largest_file=path.stat().st_size // 2), code=2)
    assert f"Expected to write a checkpoint to '{path.parent}" in errors
    assert "Traceback" not in errors
    assert torch.load(path, weights_only=True)["global_step"] == 2  # as it was
    assert hidden(tmp_path) == []
    finish(start(tmp_path, *more))
    assert torch.load(path, weights_only=True)["global_step"] == 4


def test_an_interrupt_ends_a_run_and_keeps_its_checkpoint(tmp_path):
    process = start(tmp_path, "--trainer.max_epochs=1000")
    path = checkpoint(tmp_path)
    deadline = time.monotonic() + 120.0
    while not path.exists():
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    finish(process, code=1)
    assert torch.load(path, weights_only=True)["epoch"] >= 0
    assert hidden(tmp_path) == []
    with pytest.raises(ProcessLookupError):  # nobody of its process group is left
        os.killpg(process.pid, 0)


def test_two_runs_at_once_take_two_folders(tmp_path):
    runs = [start(tmp_path, "--trainer.max_epochs=1") for _ in range(2)]
    for run in runs:
        finish(run)
    for version in range(2):
        saved = torch.load(checkpoint(tmp_path, version), weights_only=True)
        assert saved["global_step"] == 2
        assert len(list((tmp_path / "quickstart" / f"version_{version}").glob("events*"))) == 1
