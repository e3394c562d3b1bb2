"""Connections that never bring a request, and more of them than there may be."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
import sys
from typing import Any

import pytest
from scripted_client import text

from inflight_gateway import connections
from inflight_gateway.connections import ClientConnection, Connections, HeadWithBody

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 15\r\n\r\n"
BODY = b'{"prompt": "a"}'
LONG = 60.0


def ok(request):
    return text("a")


async def connect(front: Any, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which this has arrived before the gateway's first timer starts, however busy the machine is."""
    client = socket.create_connection(("127.0.0.1", int(front.url.rpartition(":")[2])))
    client.sendall(sent)
    return await asyncio.open_connection(sock=client)


async def answer(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"}}")


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


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[ClientConnection]:
    """Connections as they are made, with a small buffer in the kernel; `is_full` once much waits for the client."""
    queue: asyncio.Queue[ClientConnection] = asyncio.Queue()
    make, pause = ClientConnection.connection_made, ClientConnection.pause_writing

    def with_small_buffer(self: ClientConnection, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 13)
        self.is_full = asyncio.Event()  # type: ignore[attr-defined]
        make(self, transport)
        queue.put_nowait(self)

    def pause_writing(self: ClientConnection) -> None:
        pause(self)
        self.is_full.set()  # type: ignore[attr-defined]

    monkeypatch.setattr(ClientConnection, "connection_made", with_small_buffer)
    monkeypatch.setattr(ClientConnection, "pause_writing", pause_writing)
    return queue


def request(stream: bool, head: str = "") -> bytes:
    body = b'{"prompt": "slow", "stream": %b}' % (b"true" if stream else b"false")
    return f"POST /v1/completions HTTP/1.1\r\nHost: a\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def connected(front: Any, sent: bytes = b"", buffer: int = 1 << 18) -> socket.socket:
    """A client that reads only what a test has it read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", int(front.url.rpartition(":")[2])))
    await loop.sock_sendall(client, sent)
    return client


async def stopped_reading(front: Any, made: Any, sent: bytes = request(True)) -> tuple[socket.socket, ClientConnection]:
    """A client that asks for a long answer and reads nothing, and its connection once much waits for it."""
    client = await connected(front, sent)
    connection = await made.get()
    await connection.is_full.wait()
    return client, connection


def long(request: Any) -> Any:
    """More than the kernel's buffers take."""
    return text("a") if request.prompt != "slow" else [*text("x" * 8_000_000, finish=None), asyncio.Event()]


async def test_a_client_that_reads_nothing_loses_its_connection(start, made):
    front = await start(long, send_timeout=0.05, max_open_requests=1)
    client, _ = await stopped_reading(front, made)
    await front.client.streams[0].cancelled.wait()
    while front.gateway.metrics.open_requests:
        await asyncio.sleep(0.01)
    assert (await front.post("/v1/completions", {"prompt": "a"})).status_code == 200
    client.close()


async def test_a_client_that_reads_slowly_keeps_its_connection(start, made):
    front = await start(long, send_timeout=LONG)
    client, connection = await stopped_reading(front, made)
    for _ in range(3):
        received = connection._received_now()
        while connection._received_now() == received:
            await asyncio.get_running_loop().sock_recv(client, 1 << 20)
            await asyncio.sleep(0)
        connection._look_at_client()
        assert not connection.transport.is_closing()
    while not connection.transport.is_closing():  # what the kernel's buffers take counts as read
        connection._look_at_client()
        await asyncio.sleep(0.01)
    await front.client.streams[0].cancelled.wait()
    client.close()


async def test_a_whole_answer_may_be_read_for_longer_than_a_connection_may_be_idle(start, made, monkeypatch):
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.05)
    front = await start(lambda request: text("x" * 2_000_000), send_timeout=LONG)
    client, connection = await stopped_reading(front, made, request(False))
    while connection._timer is None:  # the answer is complete
        await asyncio.sleep(0.01)
    for _ in range(3):
        timer = connection._timer
        while connection._timer is timer:  # until it has run
            await asyncio.sleep(0.01)
    received = b""
    while not received.endswith(b"}}"):
        part = await asyncio.get_running_loop().sock_recv(client, 1 << 20)
        assert part, f"{len(received)} bytes have come"
        received += part
    assert received.count(b"x" * 2_000_000) == 1
    assert await asyncio.get_running_loop().sock_recv(client, 1) == b"", "now it is idle"
    client.close()


@pytest.mark.parametrize("head", ["Connection: close\r\n", ""])
async def test_a_client_that_leaves_the_end_of_an_answer_loses_its_connection(start, made, monkeypatch, head):
    """Less waits for it than an answer would wait for."""
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.05)
    look, waited = ClientConnection._look_at_client, []

    def look_at_client(self: ClientConnection) -> None:
        waited.append(self.transport.get_write_buffer_size())
        look(self)

    monkeypatch.setattr(ClientConnection, "_look_at_client", look_at_client)
    front = await start(lambda request: text("x" * 60_000), send_timeout=0.05)
    client = await connected(front, request(False, head), buffer=1 << 11)
    connection = await made.get()
    connection.flow.pause_writing = lambda: pytest.fail("too much waits for what this test is about")
    while connection in connection._registry._open:
        await asyncio.sleep(0.01)
    assert waited[-1] > 0
    client.close()


async def test_the_end_of_an_answer_may_be_read_after_its_connection_is_closing(start, made):
    front = await start(lambda request: text("x" * 60_000), send_timeout=LONG)
    client = await connected(front, request(False, "Connection: close\r\n"), buffer=1 << 11)
    connection = await made.get()
    while not connection.transport.is_closing():
        await asyncio.sleep(0.01)
    received = b""
    while part := await asyncio.get_running_loop().sock_recv(client, 1 << 16):
        received += part
        if connection._send_timer is not None:
            connection._received = 0
            connection._look_at_client()
    assert received.endswith(b"}}") and received.count(b"x" * 60_000) == 1
    client.close()


async def test_without_the_kernels_count_what_waits_tells_who_reads(start, made, monkeypatch):
    monkeypatch.setattr(connections, "_BYTES_ACKED", slice(500, 508))  # as of an older kernel
    front = await start(long, send_timeout=LONG)
    client, connection = await stopped_reading(front, made)
    waiting = connection.transport.get_write_buffer_size()
    while connection.transport.get_write_buffer_size() >= waiting:
        await asyncio.get_running_loop().sock_recv(client, 1 << 20)
        await asyncio.sleep(0)
    connection._look_at_client()
    assert not connection.transport.is_closing()
    client.close()


def acknowledged(connection: ClientConnection) -> int:
    """Bytes, by the kernel."""
    info = connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
    return int.from_bytes(info[120:128], sys.byteorder)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what is acknowledged")
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
async def test_little_that_is_read_is_noticed(start, made, tmp_path, tls):
    """Far less than the buffers between TLS and the wire hold, which fill again only once they are nearly empty."""
    files = [str(tmp_path / name) for name in ("key.pem", "certificate.pem")]
    if tls:
        if shutil.which("openssl") is None:
            pytest.skip("no openssl command to make a certificate with")
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", files[0], "-out", files[1]]
        subprocess.run([*command, "-subj", "/CN=localhost"], check=True, capture_output=True)
    pieces = [*text("x" * 8_000_000, *["y" * 100_000] * 20, finish=None), asyncio.Event()]
    front = await start(lambda request: pieces, send_timeout=LONG, tls=tuple(files) if tls else None)
    client = await connected(front)
    wire = client.dup()  # reads bytes as they come, without decrypting them
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        client.setblocking(True)
        client = await asyncio.to_thread(context.wrap_socket, client)
        await asyncio.to_thread(client.sendall, request(True))
        wire.setblocking(False)
    else:
        await asyncio.get_running_loop().sock_sendall(client, request(True))
    connection = await made.get()
    while not connection.flow.write_paused:
        await asyncio.sleep(0.01)
    connection._watch_client()
    before = acknowledged(connection)
    while acknowledged(connection) == before:
        await asyncio.get_running_loop().sock_recv(wire, 1 << 12)
        await asyncio.sleep(0)
    connection._look_at_client()
    assert not connection.transport.is_closing()
    client.close()
    wire.close()


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
    while not connection.transport.is_closing():
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
