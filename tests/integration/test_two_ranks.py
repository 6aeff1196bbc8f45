"""Two processes train what one process trains."""

import json
from pathlib import Path

import processes
import pytest
import torch
from cli_runner import run_cli

from trace_pl.models.loading import load_model
from trace_pl.models.names import BUILT_IN_BASE
from trace_pl.tasks.closed_web.task import ClosedWebTask

ROOT = Path(__file__).parents[2]
BASE = (
    f"--config={ROOT / 'configs' / 'quickstart.yaml'}",
    "--data.engine=trace_pl.engines.HFEngine",
    "--data.engine.max_model_len=1024",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
)
SETTINGS = (
    "fit",
    *BASE,
    "--data.questions_per_epoch=5",  # three for one rank, two for the other
    "--data.group_size=4",
    "--data.num_steps=2",
    "--data.tokens_per_forward=1500",
    "--data.evaluation_questions=5",
    "--trainer.max_epochs=2",
    "--trainer.check_val_every_n_epoch=2",
    "--model.optimizer=torch.optim.SGD",
    "--model.optimizer.lr=5.0",
)
TWO = ("--trainer.strategy=ddp", "--trainer.devices=2")


def run(folder: Path, num_ranks: int) -> dict:
    """Train in ``folder`` and return the checkpoint."""
    settings = [*SETTINGS, f"--trainer.logger.init_args.save_dir={folder}"]
    if num_ranks == 1:
        processes.run(*settings)
    else:
        processes.Ranks(num_ranks, processes.command_line, *settings, *TWO).finish()
    path = folder / "quickstart" / "version_0" / "checkpoints" / "last.ckpt"
    return torch.load(path, weights_only=True)


def test_two_ranks_sample_and_learn_what_one_does(tmp_path):
    single, double = run(tmp_path / "one", 1), run(tmp_path / "two", 2)
    assert single["global_step"] == double["global_step"] == 4
    start = flat(load_model(BUILT_IN_BASE).state_dict(), "")
    moved, error = (
        (flat(single["state_dict"], "policy.") - other).norm()
        for other in (start, flat(double["state_dict"], "policy."))
    )
    assert moved > 0.1
    assert error < 1e-3 * moved
    one, two = (summary(tmp_path / name) for name in ("one", "two"))
    assert two["success_before"] == pytest.approx(one["success_before"])
    assert two["success_after"] == pytest.approx(one["success_after"])
    assert two["tool_turns_after"] == pytest.approx(one["tool_turns_after"])
    predict_with_one_and_with_two(tmp_path)


def predict_with_one_and_with_two(folder: Path) -> None:
    """Two ranks write the file that one writes: every question once, in order."""
    checkpoint = folder / "one" / "quickstart" / "version_0" / "checkpoints" / "last.ckpt"
    (folder / "alone").mkdir()
    settings = ("predict", *BASE, "--data.test_questions=3", f"--ckpt_path={checkpoint}")
    alone = f"--trainer.default_root_dir={folder / 'alone'}"
    assert run_cli(*settings, "--trainer.logger=false", alone) == 0
    together = f"--trainer.logger.init_args.save_dir={folder / 'together'}"
    ranks = processes.Ranks(2, processes.command_line, *settings, *TWO, together)
    output = "".join(rank.finish() for rank in ranks.ranks)
    (written,) = (folder / "together").rglob("rollouts*")
    assert output.count("3 rollouts in") == 1
    assert f"3 rollouts in {written}" in output
    assert [path.name for path in (folder / "alone").iterdir()] == ["rollouts.jsonl"]
    one, two = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (folder / "alone" / "rollouts.jsonl", written)
    )
    assert [record["question_id"] for record in one] == [
        question.id for question in ClosedWebTask([3]).questions("test")[:3]
    ]
    for a, b in zip(one, two, strict=True):
        assert (a["run"]["checkpoint"], a["policy_version"]) == (str(checkpoint), 4)
        assert a["run"]["config"] is None
        assert Path(b["run"]["config"]).is_file()
        for name in ("question_id", "messages", "answer", "is_correct", "stop_reason", "tokens"):
            assert a[name] == b[name], name
        assert a["logprob"] == pytest.approx(b["logprob"], abs=1e-3)


def flat(weights: dict, prefix: str) -> torch.Tensor:
    names = sorted(load_model(BUILT_IN_BASE).state_dict())
    return torch.cat([weights[prefix + name].flatten() for name in names])


def summary(folder: Path) -> dict:
    path = folder / "quickstart" / "version_0" / "summary.json"
    return json.loads(path.read_text())
