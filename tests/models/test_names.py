"""What a model name stands for, and what is said of one that stands for nothing."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from huggingface_hub import constants

from trace_pl.errors import ConfigError
from trace_pl.models import names
from trace_pl.models.loading import load_end_ids, load_model, load_tokenizer, model_on_meta

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def forgotten():
    names._on_hub.cache_clear()


@pytest.mark.parametrize("load", [load_tokenizer, load_end_ids, load_model, model_on_meta])
def test_a_path_that_is_not_there_is_refused_in_one_sentence(load):
    with pytest.raises(ConfigError) as refused:
        load("./nope")
    assert str(refused.value) == (
        "Expected a model folder, a hub id 'owner/name' or 'closed-web-base', got './nope', which "
        "does not exist. Set `model_name` to one of these."
    )


def test_an_unknown_model_is_refused_at_once_where_the_hub_is_not_reached(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"got no connection to it .*refused.*Connect to the net"):
        load_tokenizer("owner/nope")


def test_a_model_that_was_downloaded_is_read_without_the_hub(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--kept"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    assert names.find_model("owner/kept") == str(snapshot)


ANSWERS = {
    "/api/models/owner/nope": (404, "RepoNotFound"),
    "/api/models/owner/gated": (403, "GatedRepo"),
    "/api/models/owner/busy": (503, ""),
}


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for a model that it does not have, or does not show, or is busy."""

    def do_GET(self):
        status, code = ANSWERS[self.path]
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        """Say nothing."""


def test_the_hub_decides_once_what_it_has(monkeypatch):
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        with pytest.raises(ConfigError, match="got 'owner/nope', which the hub does not have"):
            names.find_model("owner/nope")
        for name in ("owner/gated", "owner/busy"):  # whoever loads it says what is to be done
            assert names.find_model(name) == name
    finally:
        server.shutdown()
        server.server_close()
