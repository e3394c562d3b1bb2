"""Streams under stress: slow and hostile clients, faults of our own, a gateway that stops."""

from __future__ import annotations

import asyncio
import functools
import json
import socket

import httpx
from hypothesis import given
from hypothesis import strategies as st
from scripted_client import ScriptedClient, text
from starlette.applications import Starlette

from inflight_gateway.app import build_app
from inflight_gateway.completion_events import CompletionEvents
from inflight_gateway.completions import CompletionBody
from inflight_gateway.gateway import Gateway
from inflight_gateway.options import GatewayOptions
from inflight_gateway.upstream import Upstream


def request_bytes(body: dict) -> bytes:
    content = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)


async def test_a_slow_client_holds_back_its_own_stream_only(start):
    pulled = 0

    def endless():
        nonlocal pulled
        while True:
            pulled += 1
            yield text("x" * 5_000, finish=None)[0]

    front = await start(lambda request: endless() if request.prompt == "slow" else text("a"))
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", int(front.url.rpartition(":")[2])))
    slow.sendall(request_bytes({"prompt": "slow", "stream": True}))
    seen = -1
    while seen != pulled:  # until nothing more is taken from Triton
        seen = pulled
        await asyncio.sleep(0.2)
        assert (await front.post("/v1/completions", {"prompt": "quick"})).status_code == 200
    assert 0 < pulled < 5000
    slow.close()
    await asyncio.wait_for(front.client.streams[0].cancelled.wait(), 10)
    while front.gateway.metrics.open_requests:
        await asyncio.sleep(0.01)


async def test_a_fault_of_our_own_ends_the_stream_with_an_error(start, monkeypatch, caplog):
    def broken(*_):
        raise ValueError("a secret of the gateway")

    monkeypatch.setattr(CompletionEvents, "_event", broken)
    front = await start(lambda request: text("a", "b"))
    response = await front.post("/v1/completions", {"prompt": "a", "stream": True})
    events = response.text.split("\n\n")
    assert json.loads(events[0].removeprefix("data: "))["error"]["code"] == "internal_error"
    assert events[1] == "data: [DONE]" and "secret" not in response.text and "secret" in caplog.text


async def test_streams_that_outlast_the_gateway_end_with_an_error(start):
    front = await start(lambda request: [*text("a", finish=None), asyncio.Event()])
    async with front.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
        lines = response.aiter_lines()
        assert '"text":"a"' in await lines.__anext__()
        stopping = asyncio.create_task(front.shutdown())
        rest = [line async for line in lines if line]
    await stopping
    assert json.loads(rest[0].removeprefix("data: "))["error"]["code"] == "shutting_down" and rest[1] == "data: [DONE]"
    assert front.client.streams[0].cancelled.is_set()


async def test_many_connections_that_come_and_go_leave_nothing(start):
    front = await start(lambda request: [*text("a", finish=None), asyncio.Event()])
    port = int(front.url.rpartition(":")[2])
    for number in range(40):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes({"prompt": ["a", "b"], "n": 2, "stream": bool(number % 2)}))
        await writer.drain()
        if number % 4 < 2:  # some leave before they are heard
            while len(front.client.streams) < 2:
                await asyncio.sleep(0)
        writer.close()
    while front.gateway.metrics.open_requests or not all(one.cancelled.is_set() for one in front.client.streams):
        await asyncio.sleep(0.01)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from([2**63, -(2**63) - 1, 1e308, "\x00", "\u2028", "demo"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
_KEYS = st.sampled_from([*CompletionBody.__struct_fields__, *CompletionBody.UNSUPPORTED])
_BODIES = st.dictionaries(_KEYS, _VALUES, max_size=5) | _VALUES


@given(_BODIES, st.booleans())
def test_no_body_causes_an_error_of_the_gateway(body, with_prompt):
    if with_prompt and isinstance(body, dict):
        body = {"prompt": "a", **body}
    content = json.dumps(body, ensure_ascii=True).encode()
    assert asyncio.run(status_of(content)) in (200, 400, 404)


@functools.cache
def app() -> Starlette:
    options = GatewayOptions()
    client = ScriptedClient(lambda request: text("a", n=request.n))
    return build_app(options, Gateway(options, Upstream(options, client)))


async def status_of(content: bytes) -> int:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app()), base_url="http://gateway", verify=False) as http:
        return (await http.post("/v1/completions", content=content)).status_code
