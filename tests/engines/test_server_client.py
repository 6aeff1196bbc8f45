"""Calls to a server that is slow, silent or gone; a small server stands at the other end."""

import threading
import time
from concurrent.futures import wait
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from trace_pl.engines.server.client import ServerClient
from trace_pl.errors import ServerError


class SlowServer(BaseHTTPRequestHandler):
    """Answers ``/0.3`` after 0.3 s."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(float(self.path[1:]))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args):
        """Say nothing."""


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowServer)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_call_may_wait_longer_while_the_server_answers_others(url):
    client = ServerClient(url, None, max_calls=4, timeout_s=0.5)
    slow = client.post("/1.2", {})
    for _ in range(4):
        assert client.post("/0.25", {}).result() == {}
    assert slow.result(timeout=5.0) == {}
    client.close()


def test_a_server_that_answers_nothing_hangs(url):
    client = ServerClient(url, None, max_calls=4, timeout_s=0.3)
    calls = [client.post("/2", {}), client.post("/2", {})]
    wait(calls, timeout=1.5)
    for call in calls:
        with pytest.raises(
            ServerError, match=r"answered nothing for 0\.3 s, /2 among it.*timeout_s"
        ):
            call.result(timeout=0.0)
    client.close()
