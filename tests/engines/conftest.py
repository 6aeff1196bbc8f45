"""One vLLM server for all tests of the session that need a healthy one."""

import forked_servers
import pytest

from trace_pl.engines.server.engine import ServerEngine


@pytest.fixture(scope="session")
def server_engine(tiny_model_dir, server_address):
    """An engine of 64 sequences with the folder's own weights, in a process of its own."""
    with forked_servers.instead_of_interpreters(server_address):
        engine = ServerEngine(
            str(tiny_model_dir), 512, max_num_seqs=64, kv_cache_gib=0.125, seed=3, num_threads=1
        )
    yield engine
    engine.close()
