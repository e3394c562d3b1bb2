"""Clients that read their answers slowly, or not at all."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import sys
from typing import Any

import pytest
from raw_http import LONG, request
from scripted_client import text

from inflight_gateway import connections
from inflight_gateway.connections import ClientConnection


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


@pytest.mark.parametrize(
    ("behind", "limit"),
    [
        ([b"no HTTP\r\n\r\n"], {"_LINGER_SECONDS": 0.05}),
        ([b"no HTTP\r\n\r\n", b"b" * 100], {"_LINGER_SECONDS": LONG, "_LINGER_BYTES": 10}),
        ([b"GET / HT"], {}),
    ],
    ids=["seconds", "bytes", "part of a head"],
)
async def test_what_comes_behind_a_whole_answer_takes_nothing_of_it(start, made, monkeypatch, behind, limit):
    """Its client reads slowly: the answer waits in the gateway when the connection's time is up."""
    for name, value in limit.items():
        monkeypatch.setattr(connections, name, value)
    front = await start(lambda request: text("x" * 1_000_000), send_timeout=LONG, header_timeout=0.05)
    client, connection = await stopped_reading(front, made, request(False))
    while not connection.cycle.response_complete:
        await asyncio.sleep(0.01)
    for part in behind:
        connection.data_received(part)
    while not connection.transport.is_closing():
        await asyncio.sleep(0.01)
    assert connection.transport.get_write_buffer_size() > 100_000
    received = b""
    while part := await asyncio.get_running_loop().sock_recv(client, 1 << 20):
        received += part
    assert received.count(b"x" * 1_000_000) == 1
    assert received.count(b"HTTP/1.1 400 ") == bool(limit)
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
