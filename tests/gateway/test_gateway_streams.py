"""Streams under stress: slow and hostile clients, faults of our own, a gateway that stops."""

from __future__ import annotations

import asyncio
import json
import socket

from scripted_client import ScriptedClient, text

from inflight_client import InvalidRequestError
from inflight_gateway.completion_events import CompletionEvents
from inflight_gateway.gateway import Gateway
from inflight_gateway.generation import EventStream, Generation
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


class Waiting:
    """A request whose client stays."""

    def __init__(self):
        self.scope = {}

    async def receive(self):
        await asyncio.Event().wait()


async def test_chunks_that_begin_or_end_an_output_go_out_before_the_rest_of_a_burst():
    step, never = asyncio.Event(), asyncio.Event()
    scripts = {
        "runs": [*text("a", finish=None), step, *text("b", finish=None), never],
        "begins": [step, *text("a", finish=None), never],
        "ends": [*text("a", finish=None), step, *text("b")],
    }
    options = GatewayOptions()
    gateway = Gateway(options, Upstream(options, ScriptedClient(lambda request: scripts[request.prompt])))
    taken = []

    async def answer(kind):
        async with Generation(gateway, Waiting(), [{"model": "demo", "prompt": kind}]) as generation:
            await generation.first()

            async def take(pieces):
                taken.append((kind, pieces[0][1].text))

            await generation.deliver(take)

    order = [*["runs"] * 5, "begins", "ends", *["runs"] * 5]
    answers = [asyncio.create_task(answer(kind)) for kind in order]
    while len(taken) < len(order) - 1:  # all but the one that begins
        await asyncio.sleep(0)
    taken.clear()
    step.set()
    while len(taken) < len(order):
        await asyncio.sleep(0)
    assert sorted(taken[:2]) == [("begins", "a"), ("ends", "b")] and {kind for kind, _ in taken[2:]} == {"runs"}
    for one in answers:
        one.cancel()
    await asyncio.gather(*answers, return_exceptions=True)
    assert not gateway.beginning and not gateway.metrics.open_requests
    await gateway.close()


class Texts:
    """Chunks and errors as their texts."""

    begin = end = bytes

    def chunk(self, prompt, chunk):
        return chunk.text.encode()

    def failed(self, error):
        return error.message.encode()


async def test_an_error_does_not_overtake_another_prompts_chunk_that_waits_for_a_slow_client():
    goes_on, writable = asyncio.Event(), asyncio.Event()
    scripts = {
        "runs": [*text("a", finish=None), goes_on, *text("slow", finish=None), asyncio.Event()],
        "fails": [*text("b", finish=None), goes_on, InvalidRequestError("it failed")],
    }
    options = GatewayOptions()
    gateway = Gateway(options, Upstream(options, ScriptedClient(lambda request: scripts[request.prompt])))
    sent = []

    async def send(message):
        if message.get("body") == b"slow":
            await writable.wait()
        sent.append(message.get("body"))

    generation = Generation(gateway, Waiting(), [{"model": "demo", "prompt": kind} for kind in scripts])
    async with generation:
        await generation.first()
        answer = asyncio.create_task(EventStream(gateway, generation, Texts())({}, Waiting().receive, send))
        while len(sent) < 2:
            await asyncio.sleep(0)
        goes_on.set()
        for _ in range(100):  # the error gets every chance
            await asyncio.sleep(0)
        writable.set()
        await answer
    assert sent[-2:] == [b"slow", b"it failed"]
    await gateway.close()


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
