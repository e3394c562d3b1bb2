"""`/metrics` with Triton's beside the gateway's, for endpoint pickers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from scripted_client import text

from inflight_client import UnavailableError
from inflight_gateway.options import GatewayOptions

LINE = 'vllm:num_requests_waiting{model="demo",version="1"} 3'


def ok(request):
    return text("a")


@pytest.fixture
def triton() -> Iterator[HTTPServer]:
    """The text of Triton's metrics port."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/metrics"
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(f"# TYPE vllm:num_requests_waiting gauge\n{LINE}\n".encode() if found else b"")

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


async def test_metrics_show_tritons_as_well(start, triton):
    url = f"http://127.0.0.1:{triton.server_port}/metrics"
    front = await start(ok, triton_metrics=url)
    shown = (await front.http.get("/metrics")).text.splitlines()
    assert LINE in shown and "inflight_gateway_open_requests 0.0" in shown
    types = [line.split()[2] for line in shown if line.startswith("# TYPE")]
    assert len(set(types)) == len(types), "a family that comes twice is no valid text"


async def test_without_triton_there_are_no_metrics_rather_than_half_of_them(start, triton):
    base = f"http://127.0.0.1:{triton.server_port}"
    triton_gone = await start(ok, triton_metrics="http://127.0.0.1:9/metrics")
    wrong = await start(ok, triton_metrics=f"{base}/nothing")
    for front in (triton_gone, wrong):
        answer = await front.http.get("/metrics")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "upstream_unreachable"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/api/chat"])
async def test_the_time_to_first_token_is_that_of_streams_with_output(start, path):
    def answer(request):
        if request.request_id.startswith("fails"):  # a number follows for each prompt of a completion
            return [UnavailableError("the engine restarts")]
        return [event, *text("a", "b")]

    event = asyncio.Event()
    front = await start(answer)
    body = {"model": "demo", "stream": True, "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    if path != "/v1/completions":
        body.pop("prompt")
    name = f'inflight_gateway_time_to_first_token_seconds_count{{endpoint="{path}"}}'

    async def counted() -> float:
        lines = (await front.http.get("/metrics")).text.splitlines()
        return float(next((line.split()[-1] for line in lines if line.startswith(name)), 0))

    failed = await front.post(path, body, headers={"X-Request-Id": "fails"})
    whole = asyncio.ensure_future(front.post(path, {**body, "stream": False}))
    running = asyncio.ensure_future(front.post(path, body))
    while len(front.client.streams) < 3:
        await asyncio.sleep(0)
    assert failed.status_code == 503 and await counted() == 0, "nothing has come yet"
    event.set()
    assert (await running).status_code == (await whole).status_code == 200
    assert await counted() == 1


async def test_metrics_need_no_key_only_if_the_operator_says_so(start):
    closed, opened = await start(ok, api_keys=("key",)), await start(ok, api_keys=("key",), open_metrics=True)
    assert (await closed.http.get("/metrics")).status_code == 401
    assert (await opened.http.get("/metrics")).status_code == 200
    for path in ("/v1/models", "/metrics/", "/openapi.json"):
        assert (await opened.http.get(path)).status_code == 401


def test_an_address_that_is_no_url_is_refused():
    with pytest.raises(ValueError, match=r"triton_metrics='127\.0\.0\.1:8002'"):
        GatewayOptions(triton_metrics="127.0.0.1:8002")
