"""Two ranks of a sharded trainer sample with real vLLM: a shared server, or one in each process."""

import time
import urllib.request
from pathlib import Path

import pytest
from processes import PATIENCE_S, Ranks, Run, command_line, free_port
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trace_pl.engines.server.main import main as serve
from trace_pl.models.checkpoint import read_meta

ROOT = Path(__file__).parents[2]


@pytest.fixture
def url():
    """A server that was started by hand, as on another machine."""
    port = free_port()
    folder = ROOT / "trace_pl" / "tasks" / "closed_web" / "base"
    arguments = [str(folder), "--max-model-len=1024", "--max-num-seqs=32", "--dtype=float32"]
    arguments += [f"--kv-cache-memory-bytes={2**27}", "--host=127.0.0.1", f"--port={port}"]
    server = Run(serve, arguments)
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + PATIENCE_S
    while not is_healthy(address):
        assert server.poll() is None, server.output()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return address


def is_healthy(address):
    try:
        urllib.request.urlopen(f"{address}/health", timeout=5.0)
    except OSError:
        return False
    return True


def run_two_ranks(tmp_path, *engine: str, dtype: str = "float32", mean: float = 1e-5) -> None:
    """Train sharded on two ranks, and see that engine and trainer agree after every push."""
    arguments = (
        "fit",
        f"--config={ROOT / 'configs' / 'quickstart.yaml'}",
        f"--config={ROOT / 'configs' / 'strategy' / 'fsdp.yaml'}",
        f"--trainer.strategy.init_args.compute_dtype={dtype}",
        "--trainer.devices=2",
        "--trainer.accelerator=cpu",
        "--trainer.max_epochs=2",
        "--trainer.num_sanity_val_steps=0",
        "--trainer.enable_progress_bar=false",
        f"--trainer.logger.init_args.save_dir={tmp_path}",
        "--data.questions_per_epoch=3",
        "--data.group_size=2",
        "--data.evaluation_questions=2",
        *engine,
    )
    Ranks(2, command_line, *arguments).finish()
    run = tmp_path / "quickstart" / "version_0"
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    parity = [event.value for event in events.Scalars("weights/parity_mean_nats")]
    assert len(parity) == 2
    assert max(parity) < mean
    mismatch = [event.value for event in events.Scalars("mismatch/abs_nats")]
    assert mismatch[0] < mean  # later ones may be those of an older policy


def test_one_rank_pushes_for_all_and_every_rank_samples(url, tmp_path):
    run_two_ranks(
        tmp_path,
        "--data.engine=trace_pl.engines.ServerEngine",
        "--data.engine.max_model_len=1024",
        f'--data.engine.urls=["{url}"]',
        f"--data.engine.transfer.folder={tmp_path}",
    )
    assert list(tmp_path.glob("**/*.safetensors")) == []


def test_every_rank_has_an_engine_in_its_process_and_they_share_spare_questions(tmp_path):
    spare = ("--data.extra_questions=2",)
    run_two_ranks(tmp_path, "--data.engine.init_args.kv_cache_gib=0.1", *spare)
    (path,) = tmp_path.glob("quickstart/*/checkpoints/last.ckpt")
    stream = read_meta(path)["RolloutDataModule"]
    ended = stream["cursor"] - len(stream["returned"])  # what no rank finished is put back
    assert 2 * 3 <= ended <= 2 * (3 + 2)


def test_every_rank_has_a_server_of_its_own_in_half_precision(tmp_path, forks_servers):
    run_two_ranks(
        tmp_path,
        "--data.engine=trace_pl.engines.ServerEngine",
        "--data.engine.max_model_len=1024",
        "--data.engine.kv_cache_gib=0.1",
        "--data.max_staleness=1",
        dtype="bfloat16",
        mean=0.1,
    )
