"""Heads of requests that are too large, or no HTTP, and how their connections end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest
from raw_http import BODY, HEAD, LONG, answer, connect, request
from scripted_client import text

from inflight_gateway import connections
from inflight_gateway.connections import ClientConnection


def ok(request):
    return text("a")


async def test_what_is_no_http_has_an_error_object(start):
    front = await start(ok)
    reader, writer = await connect(front, b"\x16\x03\x01 hello\r\n\r\n")
    refused = await reader.read()
    assert refused.startswith(b"HTTP/1.1 400 Bad Request\r\n") and b"invalid_request_error" in refused
    assert b"x-request-id: " in refused
    writer.close()


_START = b"GET /version HTTP/1.1\r\nHost: a\r\n"
_CHUNKED = HEAD.replace(b"Content-Length: 15", b"Transfer-Encoding: chunked") + b"f\r\n" + BODY + b"\r\n"


@pytest.mark.parametrize(
    ("begins", "goes_on"),
    [
        (_START, b"X-A: b\r\n"),
        (_START + b"X-A: ", b"b"),
        (b"GET /", b"v"),
        (_CHUNKED + b"0\r\n", b"X-A: b\r\n"),
        (_CHUNKED + b"0\r\nX-A: ", b"b"),
        (_CHUNKED + b"1;", b"b"),
    ],
    ids=["headers", "header", "path", "trailers", "trailer", "chunk extension"],
)
async def test_a_head_has_a_limit(start, made, begins, goes_on):
    """The parser collects what has no end, as fast as a client sends it."""
    front = await start(ok)
    reader, writer = await connect(front)
    connection = await made.get()
    connection.data_received(begins)
    sent = 0
    while not connection._is_refused:
        connection.data_received(goes_on * 1000)
        sent += len(goes_on) * 1000
        assert sent < 200_000
    refused = await reader.read()
    assert refused.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert b"65536" in refused and b"invalid_request_error" in refused
    writer.close()
    large = {"X-A": "b" * 60_000}
    assert (await front.http.get("/version", headers=large)).status_code == 200


_TOO_LARGE = [_START + b"X-A: ", b"b" * 70_000]
_NO_HTTP = [b"\x16\x03\x01 hello\r\n\r\n"]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("bad", [_TOO_LARGE, _NO_HTTP], ids=["too large", "no HTTP"])
async def test_a_refusal_is_no_part_of_the_answer_to_an_earlier_request(start, made, bad, begun):
    front = await start(lambda request: [*(text("a", finish=None) if begun else ()), asyncio.Event()])
    reader, writer = await connect(front, request(True))
    connection = await made.get()
    while not front.client.streams:
        await asyncio.sleep(0.01)
    received = await reader.readuntil(b'"text":"a"') if begun else b""
    for part in bad:
        connection.data_received(part)
    received += await reader.read()
    assert received.count(b"HTTP/1.1 ") == begun and b"invalid_request_error" not in received
    await front.client.streams[0].cancelled.wait()
    writer.close()


@pytest.mark.parametrize("bad", [_TOO_LARGE, _NO_HTTP], ids=["too large", "no HTTP"])
async def test_a_refusal_behind_a_whole_answer_is_read(start, made, bad):
    front = await start(ok)
    reader, writer = await connect(front, request(False))
    assert (await answer(reader)).startswith(b"HTTP/1.1 200")
    connection = await made.get()
    while not connection.cycle.response_complete:
        await asyncio.sleep(0.01)
    for part in bad:
        connection.data_received(part)
    refused = await reader.read()
    assert refused.startswith(b"HTTP/1.1 4") and b"invalid_request_error" in refused
    writer.close()


async def test_a_body_that_is_wrong_after_its_answer_is_not_answered_twice(start, made):
    front = await start(ok, api_keys=("key",))
    reader, writer = await connect(front, _CHUNKED[: -len(BODY) - 5])
    assert (await answer(reader)).startswith(b"HTTP/1.1 401")
    (await made.get()).data_received(b"no length\r\n")
    assert await reader.read() == b""
    writer.close()


async def test_small_chunks_of_a_body_are_no_head(start):
    front = await start(ok)
    body = BODY + b" " * 30_000
    reader, writer = await connect(front, _CHUNKED.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
    writer.write(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
    assert (await answer(reader)).startswith(b"HTTP/1.1 200")
    writer.close()


async def refused(front: Any, made: Any) -> tuple[socket.socket, ClientConnection]:
    """A client that has read the refusal of a large head, and the connection, which the client has not closed."""
    loop = asyncio.get_running_loop()
    client = socket.create_connection(("127.0.0.1", int(front.url.rpartition(":")[2])))
    client.setblocking(False)
    await loop.sock_sendall(client, _START + b"X-A: " + b"b" * 600_000)  # more than the gateway reads at once
    received = b""
    while part := await loop.sock_recv(client, 1 << 16):
        received += part
    assert received.startswith(b"HTTP/1.1 431 ")
    return client, await made.get()


async def until_closed(connection: ClientConnection) -> None:
    while connection in connection._registry._open:
        await asyncio.sleep(0.01)


async def test_a_client_that_still_sends_does_not_lose_its_refusal(start, made, monkeypatch):
    """A connection that is closed before all has been read is reset, and what the client has not read is lost."""
    monkeypatch.setattr(connections, "_LINGER_SECONDS", LONG)
    front = await start(ok)
    client, connection = await refused(front, made)
    for _ in range(10):
        await asyncio.get_running_loop().sock_sendall(client, b"b" * 50_000)
        await asyncio.sleep(0)
    assert client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    assert await asyncio.get_running_loop().sock_recv(client, 1) == b"", "an end, not a reset"
    client.close()
    await until_closed(connection)


@pytest.mark.parametrize("limit", [{"_LINGER_BYTES": 1_000_000}, {"_LINGER_SECONDS": 0.1}], ids=["bytes", "seconds"])
async def test_a_refused_client_is_not_waited_for_without_a_limit(start, made, monkeypatch, limit):
    for name, value in {"_LINGER_SECONDS": LONG, **limit}.items():
        monkeypatch.setattr(connections, name, value)
    front = await start(ok)
    client, connection = await refused(front, made)
    if "_LINGER_BYTES" in limit:
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                await asyncio.get_running_loop().sock_sendall(client, b"b" * 50_001)
    await until_closed(connection)
    client.close()


async def test_a_refused_client_makes_room_for_others(start, made, monkeypatch):
    monkeypatch.setattr(connections, "_LINGER_SECONDS", LONG)
    front = await start(ok, max_connections=1)
    client, connection = await refused(front, made)
    reader, writer = await connect(front, HEAD + BODY)
    assert (await answer(reader)).startswith(b"HTTP/1.1 200")
    await until_closed(connection)
    writer.close()
    client.close()


@pytest.mark.parametrize("head", ["", "Expect: 100-continue\r\n"])
async def test_a_refused_body_ends_its_own_request(start, made, monkeypatch, caplog, head):
    """Its client gets one answer, however long the connection lasts."""
    monkeypatch.setattr(connections, "_LINGER_SECONDS", LONG)
    front = await start(ok)
    reader, writer = await connect(front)
    connection = await made.get()
    connection.data_received(_CHUNKED.replace(b"Host", head.encode() + b"Host")[: -len(BODY) - 5])
    connection.data_received(b"no length\r\n")
    received = await reader.read()
    assert received.count(b"HTTP/1.1 400 ") == received.count(b"HTTP/1.1 ") == 1
    while connection.tasks:
        await asyncio.sleep(0.01)
    assert not front.client.streams and "Exception in ASGI application" not in caplog.text
    writer.close()
    await until_closed(connection)


async def test_a_refused_client_does_not_delay_the_end_of_the_process(start, made, monkeypatch):
    """It is not waited for as a request whose answer has not ended."""
    monkeypatch.setattr(connections, "_LINGER_SECONDS", LONG)
    front = await start(ok)
    reader, writer = await connect(front)
    connection = await made.get()
    connection.data_received(_CHUNKED[: -len(BODY) - 5])
    connection.data_received(b"no length\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    assert connection in connection._registry._open and not connection.transport.is_closing()
    connection.shutdown()  # as the server's does first of all
    await until_closed(connection)
    writer.close()
