"""Tokens that the load's OpenAI client counts behind a router that drops an option."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from loadtest.clients import connect
from loadtest.errors import LoadTestError

USAGE = {"prompt_tokens": 3, "completion_tokens": 5}


class Router(BaseHTTPRequestHandler):
    """It knows which models there are, and drops `continuous_usage_stats`."""

    def do_GET(self) -> None:
        self._say(json.dumps({"data": [{"id": "demo"}]}).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        events: list[dict[str, Any]] = [{"choices": [{"text": text}], "usage": None} for text in ("a", "bc", "", "d")]
        events.append({"choices": [], "usage": USAGE})
        self._say(b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n")

    def _say(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Router) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_without_usage_per_event_each_text_counts_as_a_token_until_the_final_usage(address: str) -> None:
    exchange = connect("openai", address, "demo").send("text", 5)
    assert exchange.error is None
    assert [count for _, count in exchange.arrivals] == [1, 1, 1, 2]


def test_a_listed_model_is_ready(address: str) -> None:
    connect("openai", address, "demo").check()
    with pytest.raises(LoadTestError, match="model 'other' is not ready"):
        connect("openai", address, "other").check()
