"""A run that is killed with SIGKILL goes on and ends as if nothing had happened."""

import json
import random
import signal
import time
from pathlib import Path

import processes
import torch

ROOT = Path(__file__).parents[2]
EPOCHS = 4


def start(runs: Path, *more: str) -> processes.Run:
    settings = ["fit", "--config", ROOT / "configs" / "quickstart.yaml"]
    settings += [f"--trainer.logger.init_args.save_dir={runs}", f"--trainer.max_epochs={EPOCHS}"]
    settings += ["--data.engine=trace_pl.engines.HFEngine", "--data.group_size=2"]
    settings += ["--data.engine.max_model_len=1024", "--data.questions_per_epoch=3"]
    settings += ["--data.evaluation_questions=2", "--trainer.enable_progress_bar=false"]
    settings += ["--trainer.num_sanity_val_steps=0", f"--trainer.check_val_every_n_epoch={EPOCHS}"]
    return processes.start(*settings, *more)


def kill_after_next_checkpoint(run: processes.Run, path: Path, delay: float) -> None:
    """Kill at a moment of the epoch that follows the next checkpoint, whatever happens then."""
    seen = path.stat().st_mtime_ns if path.exists() else 0
    run.wait_for(lambda: path.exists() and path.stat().st_mtime_ns != seen)
    time.sleep(delay)
    run.send_signal(signal.SIGKILL)
    run.wait()


def test_a_run_killed_twice_ends_with_the_weights_of_one_that_was_not(tmp_path):
    start(tmp_path / "whole").finish()
    moments = random.Random(0)
    runs = tmp_path / "killed"
    path = runs / "quickstart" / "version_0" / "checkpoints" / "last.ckpt"
    kill_after_next_checkpoint(start(runs), path, moments.uniform(0.0, 0.3))
    resume = "--ckpt_path=last"
    kill_after_next_checkpoint(start(runs, resume), path, moments.uniform(0.0, 0.3))
    torch.load(path, weights_only=True)  # whole, whenever the process died
    start(runs, resume).finish()
    whole, killed = (
        torch.load(folder / "quickstart" / "version_0" / "checkpoints" / "last.ckpt")
        for folder in (tmp_path / "whole", runs)
    )
    assert killed["epoch"] == whole["epoch"] == EPOCHS - 1
    assert killed["RolloutDataModule"] == whole["RolloutDataModule"]
    for name, expected in whole["state_dict"].items():
        torch.testing.assert_close(killed["state_dict"][name], expected, atol=1e-6, rtol=0.0)
    leftovers = [
        p.name for p in (runs / "quickstart").rglob("*") if p.name.startswith((".", "tmp"))
    ]
    assert leftovers == []
    summary = json.loads((path.parents[1] / "summary.json").read_text())
    assert summary["epochs"] == EPOCHS
