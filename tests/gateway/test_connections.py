"""Connections that never bring a request, and more of them than there may be."""

from __future__ import annotations

import asyncio
import json

import pytest
from raw_http import BODY, HEAD, LONG, answer, connect, request
from scripted_client import text

from inflight_gateway import connections
from inflight_gateway.connections import Connections, HeadWithBody


def ok(request):
    return text("a")


@pytest.mark.parametrize("sent", [b"", b"P", HEAD[:-2], b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 9])
async def test_a_connection_without_a_request_is_closed(start, sent):
    front = await start(ok, header_timeout=0.1)
    reader, writer = await connect(front, sent)
    assert await reader.read() == b""
    writer.close()
    reader, writer = await connect(front, HEAD + BODY)
    assert (await answer(reader)).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_a_request_has_no_header_timeout(start):
    held = asyncio.Event()
    front = await start(lambda request: [held, *text("a")], header_timeout=0.2)
    reader, writer = await connect(front, HEAD + BODY)
    while not front.client.streams:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)  # longer than the timeout, which must not run
    held.set()
    assert (await answer(reader)).startswith(b"HTTP/1.1 200")
    writer.write(HEAD[:20])  # a second request, which never comes
    assert await reader.read() == b""
    writer.close()


async def test_pipelined_requests_are_answered_before_the_connection_is_idle(start, monkeypatch):
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.1)
    front = await start(lambda request: [0.2, *text("a")], header_timeout=0.1, max_connections=1)
    reader, writer = await connect(front, (HEAD + BODY) * 3)
    answers = await reader.read()  # to the end: then it has been idle
    assert answers.count(b"HTTP/1.1 200") == 3
    writer.close()


async def test_a_client_that_hangs_up_on_pipelined_requests_cancels_the_one_that_is_answered(start):
    front = await start(lambda request: [*text("a", finish=None), asyncio.Event()])
    body = b'{"prompt": "a", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    reader, writer = await connect(front, (head + body) * 3)
    await reader.readuntil(b'"text":"a"')
    writer.transport.abort()
    await front.client.streams[0].cancelled.wait()
    while front.gateway.metrics.open_requests:
        await asyncio.sleep(0.01)
    assert len(front.client.streams) == 1, "no later request is sent for a client that is gone"


async def test_pipelined_streams_come_in_order(start):
    """With bodies of a known length, and in pieces with extensions and trailers."""
    front = await start(lambda request: text(request.prompt, "z"))
    sent = []
    for number in range(30):
        body = b'{"prompt": "p%d", "stream": true}' % number
        pieces = b"5;a=b\r\n%b\r\n%x\r\n%b\r\n0\r\nX-A: b\r\n\r\n" % (body[:5], len(body) - 5, body[5:])
        known = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        framed = b"Transfer-Encoding: chunked\r\n\r\n" + pieces
        sent.append(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + (framed if number % 2 else known))
    reader, writer = await connect(front, b"".join(sent))
    answers = [await reader.readuntil(b"[DONE]") for _ in sent]
    assert all(b'"text":"p%d"' % number in answer for number, answer in enumerate(answers))
    writer.close()


async def test_an_idle_connection_is_closed(start, monkeypatch):
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.1)
    front = await start(ok, header_timeout=LONG)
    reader, writer = await connect(front, HEAD + BODY)
    assert (await answer(reader)).startswith(b"HTTP/1.1 200")
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("rest", [5, 15])
async def test_a_refused_body_that_comes_late_ends_its_connection(start, monkeypatch, rest):
    """The rest of the body is discarded; the connection may then wait for a request, and not longer."""
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.1)
    front = await start(ok, api_keys=("key",), header_timeout=0.1)
    reader, writer = await connect(front, HEAD)
    assert (await answer(reader)).startswith(b"HTTP/1.1 401")
    writer.write(BODY[:rest])
    assert await reader.read() == b""
    writer.close()


async def test_silent_connections_make_room_for_requests(start):
    front = await start(ok, max_connections=5, header_timeout=LONG)
    silent = [await connect(front, HEAD[:number]) for number in range(5)]
    for number in range(5):
        reader, writer = await connect(front, HEAD + BODY)
        assert (await answer(reader)).startswith(b"HTTP/1.1 200")
        assert await silent[number][0].read() == b"", "the one that has waited longest is closed"
        silent[number][1].close()
        silent.append((reader, writer))
    for _, writer in silent:
        writer.close()


async def test_more_connections_than_allowed_are_refused(start):
    held = asyncio.Event()
    front = await start(lambda request: [held, *text("a")], max_connections=2)
    busy = [await connect(front, HEAD + BODY) for _ in range(2)]
    while len(front.client.streams) < 2:
        await asyncio.sleep(0.01)
    reader, writer = await connect(front)
    refused = await reader.read()
    assert refused.startswith(b"HTTP/1.1 503") and b"connections_full" in refused and b"x-request-id: " in refused
    held.set()
    assert all([(await answer(one[0])).startswith(b"HTTP/1.1 200") for one in busy])
    for _, one in [*busy, (reader, writer)]:
        one.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_of_http_1_0_gets_a_stream_without_chunks(start, stream):
    front = await start(ok)
    reader, writer = await connect(front, request(stream).replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    if stream:
        assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")
    else:
        assert b"content-length: %d\r\n" % len(body) in head and json.loads(body)["choices"]
    writer.close()


def test_the_limit_is_what_the_process_can_open(monkeypatch, caplog):
    monkeypatch.setattr(connections, "_descriptors", lambda: 200)
    assert Connections(4096, 1.0)._limit == 136 and "lowered to 136" in caplog.text
    assert Connections(100, 1.0)._limit == 100


class _Writes(asyncio.Transport):
    def __init__(self):
        super().__init__()
        self.done = []

    def write(self, data):
        self.done.append(bytes(data))

    def close(self):
        self.done.append("closed")


def test_a_head_is_written_together_with_what_follows_it_at_once():
    async def respond():
        transport = _Writes()
        response = HeadWithBody(transport, asyncio.get_running_loop())
        response.write(b"head ")
        response.write(b"first")
        assert transport.done == [b"head first"]  # not even at the end of the loop's turn: now
        response.write(b"second")
        await asyncio.sleep(0)
        return transport.done

    assert asyncio.run(respond()) == [b"head first", b"second"]


def test_a_head_without_anything_behind_it_does_not_wait():
    async def respond():
        transport = _Writes()
        response = HeadWithBody(transport, asyncio.get_running_loop())
        response.write(b"head")
        await asyncio.sleep(0)
        early = list(transport.done)
        response.write(b"body")
        return early, transport.done

    assert asyncio.run(respond()) == ([b"head"], [b"head", b"body"])


def test_closing_writes_the_head_first():
    async def respond():
        transport = _Writes()
        response = HeadWithBody(transport, asyncio.get_running_loop())
        response.write(b"head")
        response.close()
        await asyncio.sleep(0)
        return transport.done

    assert asyncio.run(respond()) == [b"head", "closed"]
