"""Two nodes, as far as one machine can be two: the launch file started twice on loopback."""

import os
import subprocess
import sys
from pathlib import Path

from processes import PATIENCE_S, Ranks, command_line, free_port, popen

from trace_pl.models.checkpoint import read_checkpoint

ROOT = Path(__file__).parents[2]

SETTINGS = (
    f"--config={ROOT / 'configs' / 'quickstart.yaml'}",
    f"--config={ROOT / 'configs' / 'strategy' / 'hsdp.yaml'}",
    "--trainer.strategy.init_args.shard_size=1",  # a node of this test has one process
    "--trainer.strategy.init_args.compute_dtype=float32",
    "--trainer.strategy.init_args.timeout_s=600",
    "--trainer.accelerator=cpu",
    "--data.engine=trace_pl.engines.HFEngine",
    "--data.engine.max_model_len=1024",
    "--data.questions_per_epoch=3",
    "--data.group_size=2",
    "--data.evaluation_questions=2",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.max_epochs=2",
    "--trainer.enable_progress_bar=false",
)


def start_node(
    rank: int, port: int, runs: Path, *settings: str, nodes: int = 2
) -> subprocess.Popen:
    environment = {
        **os.environ,
        "NODE_RANK": str(rank),
        "NODES": str(nodes),
        "GPUS_PER_NODE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHON": sys.executable,
    }
    return popen(
        [ROOT / "configs" / "launch" / "torchrun.sh", *SETTINGS, *settings,
         f"--trainer.logger.init_args.save_dir={runs}"],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_two_nodes_train_one_policy(tmp_path):
    port = free_port()
    nodes = [start_node(rank, port, tmp_path) for rank in range(2)]
    for node in nodes:
        _, errors = node.communicate(timeout=PATIENCE_S)
        assert node.returncode == 0, errors[-3000:]
    (run,) = (tmp_path / "quickstart").iterdir()
    saved = read_checkpoint(run / "checkpoints" / "last.ckpt")
    assert saved["epoch"] == 1
    assert saved["global_step"] == 4
    assert saved["RolloutDataModule"]["cursor"] == 6


def test_a_world_that_can_not_be_divided_is_refused(tmp_path):
    wrong = "--trainer.strategy.init_args.shard_size=4"
    node = start_node(0, free_port(), tmp_path, wrong, nodes=1)
    _, errors = node.communicate(timeout=PATIENCE_S)
    assert node.returncode != 0
    assert "shard_size (4) divides, got 1" in errors
    runs = f"--trainer.logger.init_args.save_dir={tmp_path}"
    two = ("--trainer.devices=2", "--trainer.num_nodes=1")
    group = Ranks(2, command_line, "fit", *SETTINGS, wrong, runs, *two)
    for rank in group.ranks:
        assert "shard_size (4) divides, got 2" in rank.finish(code=2)
    assert list(tmp_path.glob("quickstart/*")) == []
