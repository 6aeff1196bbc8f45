"""What can go wrong with vLLM in another process, tried on real servers."""

import logging
import os
import re
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
import torch
from processes import PATIENCE_S, Run, free_port, run_script
from scripted import SCHEMA, FunctionTools

from trace_pl.engines.protocol import GenerationRequest
from trace_pl.engines.server.client import ServerClient
from trace_pl.engines.server.engine import ServerEngine
from trace_pl.engines.server.main import main as serve
from trace_pl.engines.server.weight_files import WeightFiles
from trace_pl.errors import ConfigError, RolloutError, ServerError, WeightSyncError
from trace_pl.models.loading import load_model
from trace_pl.rollout.agent import AgentLoop
from trace_pl.rollout.chat.call_formats import HermesFormat
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.rollout.parity import check_parity
from trace_pl.rollout.trajectory import AgentLimits
from trace_pl.tasks.rewards import ExactMatchReward
from trace_pl.types import Question, ToolResult

END = 2
PROMPT = list(range(3, 303))


@pytest.fixture
def weights(tiny_model_dir):
    """A model whose weights are not those of the folder."""
    model = load_model(str(tiny_model_dir))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
    return model


def named(model):
    return dict(model.named_parameters()).items()


def submit(engine, count=4, max_tokens=400, prompt=PROMPT[:8]):
    for number in range(count):
        engine.submit(GenerationRequest(f"id-{number}", prompt, max_tokens, (END,), f"s{number}/1"))


def drain(engine):
    found = {}
    while engine.has_unfinished():
        found |= {c.request_id: c for c in engine.step()}
    return found


def family(pid):
    """The processes of a server."""
    server = psutil.Process(pid)
    return [server, *server.children(recursive=True)]


def wait_until_gone(processes, timeout_s=PATIENCE_S):
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return not alive


# --- refusals --------------------------------------------------------------------------------


def test_a_refused_push_says_why_and_the_next_one_heals(server_engine, weights):
    wrong = dict(named(weights))
    wrong["model.layers.9.mlp.up_proj.weight"] = wrong.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ServerError, match=r"answer /update_weights, got status 500.*layers\.9"):
        server_engine.push_weights(wrong.items(), version=1)
    assert list(server_engine._folder.iterdir()) == []
    server_engine.push_weights(named(weights), version=2)
    check_parity(server_engine, weights, PROMPT, tolerance=1e-4)
    assert list(server_engine._folder.iterdir()) == []


def test_a_request_longer_than_the_server_reads_is_refused_in_its_words(server_engine):
    submit(server_engine, count=1, prompt=[5] * 600)
    with pytest.raises(ServerError, match=r"got status 400.*512"):
        drain(server_engine)
    assert not server_engine.has_unfinished()


def test_a_server_that_hangs_is_an_error_in_time(server_engine):
    pid = server_engine.pid
    client = ServerClient("http://vllm", server_engine._child.process.socket, 4, timeout_s=0.5)
    os.killpg(pid, signal.SIGSTOP)
    try:
        with pytest.raises(ServerError, match=r"answered nothing for 0\.5 s, /resume among it"):
            client.post("/resume").result()
    finally:
        os.killpg(pid, signal.SIGCONT)
        client.close()


def test_a_server_that_is_not_there_is_an_error():
    with pytest.raises(
        ServerError, match=r"127.0.0.1:9 .*3 broken connections.*Connect call failed"
    ):
        ServerEngine("closed-web-base", urls=["http://127.0.0.1:9"])


def test_a_child_that_can_not_start_shows_its_log_and_leaves_nothing(
    tiny_model_dir, tmp_path, monkeypatch
):
    (tmp_path / "vllm.py").write_text("raise ImportError('no vLLM here')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    before = set(psutil.Process().children())
    transfer = WeightFiles(str(tmp_path / "shared"))
    (tmp_path / "shared").mkdir()
    with pytest.raises(ConfigError, match=r"(?s)no vLLM here.*pip install 'trace-pl\[vllm"):
        ServerEngine(str(tiny_model_dir), 512, kv_cache_gib=0.1, transfer=transfer)
    assert set(psutil.Process().children()) == before
    assert list((tmp_path / "shared").iterdir()) == []


# --- no orphans ------------------------------------------------------------------------------

TRAINER = """
import sys, time
from trace_pl.engines.server.engine import ServerEngine
from trace_pl.engines.server.weight_files import WeightFiles
engine = ServerEngine(sys.argv[1], 512, kv_cache_gib=0.1, transfer=WeightFiles(sys.argv[2]))
(engine._folder / "left.safetensors").write_text("weights on their way")
print('server', engine.pid, flush=True)
time.sleep(600)
"""
FAILING_TRAINER = """
import sys
from pathlib import Path
from trace_pl.engines.server.process import ServerProcess
folder = Path(sys.argv[2]) / "weights"
folder.mkdir()
print('server', ServerProcess([sys.argv[1]], 1, [folder]).pid, flush=True)
raise RuntimeError("the trainer fails while its server starts")
"""


def server_of(trainer):
    """Return the id of a trainer's server, which has an interpreter of its own; None before it."""
    found = re.search(r"^server (\d+)$", trainer.output(), re.MULTILINE)
    return found and int(found[1])


def test_no_process_and_no_file_outlives_a_killed_trainer(tiny_model_dir, tmp_path):
    trainer = Run(run_script, TRAINER, str(tiny_model_dir), str(tmp_path))
    trainer.wait_for(lambda: server_of(trainer))
    servers = family(server_of(trainer))
    assert len(servers) == 2  # vLLM's front and its engine
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert wait_until_gone(servers)
    assert list(tmp_path.iterdir()) == []


def test_no_process_and_no_file_outlives_a_trainer_that_fails(tiny_model_dir, tmp_path):
    trainer = Run(run_script, FAILING_TRAINER, str(tiny_model_dir), str(tmp_path))
    assert "the trainer fails" in trainer.finish(code=1)
    deadline = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(server_of(trainer)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


# --- servers on other machines ---------------------------------------------------------------


@pytest.fixture(scope="module")
def urls(tiny_model_dir):
    """Two servers, started as a user would on two machines."""
    ports = [free_port(), free_port()]
    arguments = [str(tiny_model_dir), "--max-model-len=512", "--dtype=float32"]
    arguments += ["--kv-cache-memory-bytes=100000000", "--host=127.0.0.1"]
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR"}
    servers = [Run(serve, [*arguments, f"--port={port}"], environment=quiet) for port in ports]
    for port, server in zip(ports, servers, strict=True):
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert server.poll() is None, server.output()[-3000:]
            time.sleep(0.1)
    yield [f"http://127.0.0.1:{port}" for port in ports]
    for server in servers:
        server.send_signal(signal.SIGTERM)
    for server in servers:
        server.wait()


def test_weights_and_requests_reach_every_server(urls, tiny_model_dir, weights, server_engine):
    engine = ServerEngine(str(tiny_model_dir), 512, seed=3, urls=urls)
    engine.push_weights(named(weights), version=5)
    check_parity(engine, weights, PROMPT, tolerance=1e-4)
    calls = [client.get("/weight_info")["weight_version"] for client in engine._servers._clients]
    assert calls == [engine._label] * 2
    server_engine.push_weights(named(weights), version=5)
    submit(engine, count=16)
    submit(server_engine, count=16)
    found, expected = drain(engine), drain(server_engine)
    assert {key: c.token_ids for key, c in found.items()} == {
        key: c.token_ids for key, c in expected.items()
    }
    engine.close()


def test_a_server_that_differs_fails_the_parity_check(urls, tiny_model_dir, weights):
    both = ServerEngine(str(tiny_model_dir), 512, urls=urls)
    both.push_weights(named(weights), version=1)
    check_parity(both, weights, PROMPT, tolerance=1e-4)
    last = ServerEngine(str(tiny_model_dir), 512, urls=urls[1:])
    last.push_weights(named(load_model(str(tiny_model_dir))), version=1)
    with pytest.raises(WeightSyncError):
        check_parity(both, weights, PROMPT, tolerance=1e-4)
    submit(both, count=16)  # to both servers, one of which has weights of another run
    with pytest.raises(RolloutError, match="restarted, or another run pushes weights to it"):
        drain(both)
    assert not both.has_unfinished()
    both.close()
    last.close()


def test_a_push_that_a_killed_trainer_left_half_done_is_no_obstacle(urls, tiny_model_dir, weights):
    engine = ServerEngine(str(tiny_model_dir), 512, urls=urls)
    engine._servers._all("/pause?mode=abort")
    engine._servers._all("/start_weight_update")
    engine.close()
    engine = ServerEngine(str(tiny_model_dir), 512, urls=urls)
    engine.push_weights(named(weights), version=1)
    check_parity(engine, weights, PROMPT, tolerance=1e-4)
    engine.close()


def test_a_server_without_what_trace_pl_needs_is_refused(urls, tiny_model_dir, monkeypatch):
    with pytest.raises(ConfigError, match="read 600 tokens, got at most 512"):
        ServerEngine(str(tiny_model_dir), 600, urls=urls)
    monkeypatch.setattr(WeightFiles, "make_folder", lambda self: Path("/only/on/this/machine"))
    with pytest.raises(ServerError, match="Expected the trainer's folder"):
        ServerEngine(str(tiny_model_dir), 512, urls=urls)


# --- a child that dies -----------------------------------------------------------------------


def test_a_server_killed_in_a_phase_is_started_again_as_it_was(
    server_engine, weights, tokenizer, caplog, forks_servers
):
    template = ChatTemplate(tokenizer, [SCHEMA])
    tools = FunctionTools(lambda *_: ToolResult("a page"))
    limits = AgentLimits(4, 40, 512)
    loop = AgentLoop(server_engine, template, tools, HermesFormat(), ExactMatchReward(), limits)
    questions = [Question(f"q{i}", "Who built the tower?", ("Mira Holt",)) for i in range(2)]
    server_engine.push_weights(named(weights), version=7)
    undisturbed = [r for group in loop.collect(questions, 8) for r in group.rollouts]
    killed = []

    def kill(counts):
        if not killed:
            killed.extend(family(server_engine.pid))
            os.killpg(server_engine.pid, signal.SIGKILL)

    with caplog.at_level(logging.WARNING):
        disturbed = [r for group in loop.collect(questions, 8, kill) for r in group.rollouts]
    assert "started once more" in caplog.text
    assert wait_until_gone(killed)
    assert len(undisturbed) == len(disturbed) == 16
    for a, b in zip(undisturbed, disturbed, strict=True):
        assert torch.equal(a.token_ids, b.token_ids)
    assert server_engine.version == 7
    check_parity(server_engine, weights, PROMPT, tolerance=1e-4)

    # The engine behind the server dies as well: the second death with the same weights.
    submit(server_engine)
    engine_core = psutil.Process(server_engine.pid).children()[0]
    engine_core.kill()
    with pytest.raises(ServerError, match="a second time") as failure:
        drain(server_engine)
    assert "EngineDeadError" in str(failure.value)
    assert not server_engine.has_unfinished()


def test_the_next_push_starts_a_server_that_died_while_idle(server_engine, weights, forks_servers):
    if not server_engine._child.process.has_exited():
        os.killpg(server_engine.pid, signal.SIGKILL)
        assert server_engine._child.process.has_exited(PATIENCE_S)
    # An iterator is enough for a push, but cannot be read again.
    server_engine.push_weights(weights.named_parameters(), version=2)
    check_parity(server_engine, weights, PROMPT, tolerance=1e-4)
    submit(server_engine)
    processes = family(server_engine.pid)
    os.kill(server_engine.pid, signal.SIGKILL)
    with pytest.raises(ServerError, match="read only once"):
        drain(server_engine)
    assert wait_until_gone(processes)  # vLLM's engine ends with the front
