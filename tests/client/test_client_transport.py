"""Transports against servers that misbehave, which this file plays."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from inflight_client import (
    AsyncClient,
    Client,
    InvalidRequestError,
    RetryPolicy,
    ServerError,
    ServerUnreachableError,
    UnavailableError,
    transport_grpc,
)
from inflight_client.connection import Connection
from inflight_client.endpoint import find_endpoint
from inflight_client.request import GenerationRequest
from inflight_client.transport_grpc import AsyncGrpcTransport, GrpcTransport

ONCE = RetryPolicy(max_attempts=1)
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n"


class HttpServer:
    """Answers every request with the given chunks of bytes, then closes the connection."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.requests: list[str] = []
        self._pieces = pieces
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line[16:]) for line in head.lower().split("\r\n") if line.startswith("content-length: ")), 0)
        self.requests.append(head + (await reader.readexactly(length)).decode())
        for piece in self._pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.close()

    def __enter__(self) -> HttpServer:
        self._thread.start()
        serving = asyncio.start_server(self._answer, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result(10)
        self.address = "127.0.0.1:{1}".format(*self._server.sockets[0].getsockname())
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def event(text: str, **outputs: Any) -> bytes:
    values = {"text_output": text, "finish_reason": "None", "token_ids": [], **outputs}
    return b"data: " + json.dumps(values, ensure_ascii=False).encode() + b"\n\n"


def over_http(*pieces: bytes, **options: Any) -> tuple[list[str], HttpServer]:
    """Texts of the chunks that a client reads from these bytes."""
    with HttpServer(list(pieces)) as server, Client(server.address, protocol="http", retries=ONCE, **options) as client:
        return [chunk.text for chunk in client.stream("p")], server


def test_events_are_reassembled_wherever_they_were_split() -> None:
    stream = event("nä") + b": a comment\n\n" + event("漢🙂") + b"\r\n" + event("end", finish_reason="stop")
    for size in (1, 3, 7, len(stream)):
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert over_http(SSE, *pieces)[0] == ["nä", "漢🙂", "end"]


def test_an_interrupt_that_does_not_end_the_wait_itself_is_noticed() -> None:
    """The kernel hands it to another thread here, in an interpreter of its own."""
    program = """
import socket, threading
from signal import SIGINT, default_int_handler, pthread_kill, signal
from inflight_client import Client
signal(SIGINT, default_int_handler)
silent = socket.create_server(("127.0.0.1", 0))
with Client("127.0.0.1:%d" % silent.getsockname()[1], protocol="http") as client:
    stream = client.stream("p")
    get, waits = stream._call._queue.get, threading.Event()
    class Queue:
        def get(self, **options):
            waits.set()
            return get(**options)
    stream._call._queue = Queue()
    threading.Thread(target=lambda: waits.wait() and pthread_kill(threading.get_ident(), SIGINT), daemon=True).start()
    try:
        next(stream)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "interrupted\n", done.stderr


def test_headers_are_sent() -> None:
    _, server = over_http(SSE, event("a"), headers={"Authorization": "Bearer x"})
    assert "authorization: bearer x" in server.requests[0].lower()
    assert server.requests[0].startswith("POST /v2/models/demo/generate_stream ")


def test_an_error_event_of_any_status_is_the_servers_error() -> None:
    with pytest.raises(UnavailableError, match="queue is full"):
        over_http(SSE, b'data: {"error":"the queue is full"}\n\n')
    with pytest.raises(InvalidRequestError, match="out of range"):
        over_http(SSE.replace(b"200 OK", b"400 Bad"), b'data: {"error":"n=0 is out of range"}\n\n')


def test_an_error_page_of_a_proxy_is_quoted() -> None:
    page = b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n<html>upstream is gone"
    with pytest.raises(ServerError, match=r"502.*upstream is gone"):
        over_http(page)


def test_an_answer_that_is_not_an_event_stream() -> None:
    page = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n<html>hello"
    with pytest.raises(ServerError, match="text/event-stream"):
        over_http(page)


def test_a_connection_that_breaks_is_not_an_end() -> None:
    chunked = SSE.replace(b"Connection: close", b"Transfer-Encoding: chunked")
    data = event("a")
    with pytest.raises(ServerUnreachableError, match="lost the connection") as caught:
        over_http(chunked, f"{len(data):x}\r\n".encode() + data + b"\r\n")
    assert caught.value.partial is not None and caught.value.partial.text == "a"


@pytest.mark.parametrize("status", [b"200 OK", b"404 Not Found", b"502 Bad Gateway"])
def test_whatever_answers_by_http_is_an_http_endpoint(status: bytes) -> None:
    with HttpServer([b"HTTP/1.1 " + status + b"\r\nConnection: close\r\n\r\n"]) as server:
        assert find_endpoint(server.address) == ("http", f"http://{server.address}")


def test_a_control_answer_that_is_not_json_is_an_error() -> None:
    page = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\nhello"
    says = r"to /v2/models/demo/generate is not a JSON object: 'hello'"
    with (
        HttpServer([page]) as server,
        Client(server.address, protocol="http") as client,
        pytest.raises(ServerError, match=says),
    ):
        client.control("step_trace")


Script = Callable[[grpc.ServicerContext], Iterator[service_pb2.ModelStreamInferResponse]]


class GrpcServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers every streaming inference from a script."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def ModelStreamInfer(self, requests: Any, context: grpc.ServicerContext) -> Any:
        next(requests)
        yield from self._script(context)


@contextmanager
def grpc_server(script: Script, threads: int = 2) -> Iterator[str]:
    """Address of a `GrpcServer`."""
    server = grpc.server(ThreadPoolExecutor(threads))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(GrpcServer(script), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


def over_grpc(script: Script) -> list[str]:
    with grpc_server(script) as address, Client(address, retries=ONCE) as client:
        return [chunk.text for chunk in client.stream("p")]


def test_whatever_answers_by_grpc_is_a_grpc_endpoint() -> None:
    """This server does not even implement `ServerLive`."""
    with grpc_server(lambda _: iter([])) as address:
        assert find_endpoint(f"http://{address}") == ("grpc", f"grpc://{address}")


@pytest.mark.parametrize("texts", [[], ["a", "b"]])
def test_a_control_answer_is_exactly_one_text(texts: list[str]) -> None:
    def script(_: grpc.ServicerContext) -> Any:
        yield from (reply(text) for text in texts)
        final = service_pb2.ModelStreamInferResponse()
        final.infer_response.parameters["triton_final_response"].bool_param = True
        yield final

    says = f"with {len(texts)} texts; expected one"
    with grpc_server(script) as address, Client(address) as client, pytest.raises(ServerError, match=says):
        client.control("step_trace")


def reply(text: str, final: bool = False) -> service_pb2.ModelStreamInferResponse:
    message = service_pb2.ModelStreamInferResponse()
    message.infer_response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
    message.infer_response.raw_output_contents.append(len(text).to_bytes(4, "little") + text.encode())
    message.infer_response.parameters["triton_final_response"].bool_param = final
    return message


def test_the_final_flag_ends_a_stream() -> None:
    assert over_grpc(lambda _: iter([reply("a"), reply("b", final=True)])) == ["a", "b"]


def test_a_stream_without_its_final_response_is_an_error() -> None:
    with pytest.raises(ServerUnreachableError, match="without a final response") as caught:
        over_grpc(lambda _: iter([reply("a")]))
    assert caught.value.partial is not None and caught.value.partial.text == "a"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, ServerUnreachableError),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError),
        (grpc.StatusCode.UNAUTHENTICATED, ServerError),
    ],
)
def test_a_status_of_the_call_itself(code: grpc.StatusCode, kind: type[Exception]) -> None:
    def script(context: grpc.ServicerContext) -> Any:
        yield reply("a")
        context.abort(code, "because")

    with pytest.raises(kind, match="because") as caught:
        over_grpc(script)
    assert caught.value.code == code.name  # type: ignore[attr-defined]


# -- many streams on one connection -----------------------------------------------------------------


def _alive() -> dict[str, int]:
    """Live objects of requests, other tests' included, and the pending tasks of this test's loop."""
    gc.collect()
    kinds = ("AsyncStream", "AsyncGrpcCall", "UnaryStreamCall", "StreamStreamCall", "Continuation", "_AioCall")
    counts = Counter(type(one).__name__ for one in gc.get_objects())
    return {kind: counts[kind] for kind in kinds} | {
        "tasks": len(asyncio.all_tasks()),
        "files": len(os.listdir("/proc/self/fd")),
        "timers": sum(not timer.cancelled() for timer in asyncio.get_running_loop()._scheduled),  # type: ignore[attr-defined]
    }


async def test_hundreds_of_streams_leave_nothing() -> None:
    """Complete requests, failed ones, and some that are abandoned after their first response."""
    policy = RetryPolicy(max_attempts=1, resume=True)  # with a timer that watches each stream
    kinds = itertools.cycle(["complete", "left", "failed"])

    def script(context: grpc.ServicerContext) -> Iterator[Any]:
        kind = next(kinds)
        yield reply(kind)
        if kind == "left":
            gone = threading.Event()
            if not context.add_callback(gone.set) or gone.wait(20):
                return
        if kind == "failed":
            yield service_pb2.ModelStreamInferResponse(error_message="it failed")
        else:
            yield reply("b", final=True)

    async def one(client: AsyncClient) -> None:
        with suppress(ServerError):
            async with client.stream("p") as stream:
                async for chunk in stream:
                    if chunk.text == "left":
                        break

    with grpc_server(script, threads=20) as address:
        async with AsyncClient(address, retries=policy) as client:
            for _ in range(5):
                await asyncio.gather(*(one(client) for _ in range(20)))
            before = _alive()
            for _ in range(30):
                await asyncio.gather(*(one(client) for _ in range(20)))
            for _ in range(400):  # the last ones take a moment to be gone
                after = _alive()
                if all(after[kind] <= before[kind] for kind in before) and not after["timers"]:
                    break
                await asyncio.sleep(0.05)
            else:
                raise AssertionError(f"{after} instead of {before}")


async def test_a_task_that_is_cancelled_before_the_first_response_cancels_its_call() -> None:
    """At the server, and at once, though the object of the call lives on."""
    asked, gone = threading.Event(), threading.Event()

    def script(context: grpc.ServicerContext) -> Iterator[Any]:
        context.add_callback(gone.set)
        asked.set()
        gone.wait(20)
        yield from ()

    with grpc_server(script) as address:
        transport = AsyncGrpcTransport(Connection("grpc", address))
        call = transport.open(GenerationRequest(model="m", prompt="p"), None)
        reading = asyncio.create_task(call.__anext__())
        assert await asyncio.to_thread(asked.wait, 20)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await asyncio.to_thread(gone.wait, 10)
        await transport.close()


class Ending:
    """A server that has sent its final response, and ends the stream when `gate` is set.

    Attributes:
        was_cancelled: whether the client had cancelled by then.
    """

    def __init__(self) -> None:
        self.gate, self.ended = threading.Event(), threading.Event()
        self.was_cancelled: bool | None = None

    def __call__(self, context: grpc.ServicerContext) -> Iterator[Any]:
        yield reply("a", final=True)
        self.gate.wait(20)
        self.was_cancelled = not context.is_active()
        self.ended.set()


@pytest.mark.parametrize("how", ["cancelled", "dropped"])
def test_a_call_is_not_cancelled_once_its_final_response_has_come(how: str) -> None:
    """A cancellation that races with the last response can make Triton 24.10 keep the model."""
    with grpc_server(ending := Ending()) as address:
        transport = GrpcTransport(Connection("grpc", address))
        call = transport.open(GenerationRequest(model="m", prompt="p"), None)
        next(call)
        if how == "cancelled":
            call.cancel()
        kept = weakref.ref(call._call)
        del call
        gc.collect()
        with suppress(InvalidRequestError):
            transport.server_live()  # it reaches the server after what was sent before it
        ending.gate.set()
        assert ending.ended.wait(20) and not ending.was_cancelled
        for _ in range(2000):  # it lives until the server has ended it, and no longer
            if kept() is None:
                break
            time.sleep(0.01)
        assert kept() is None
        transport.close()


def test_the_end_of_a_stream_is_waited_for_with_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_grpc, "_END_SECONDS", 0.05)
    with grpc_server(ending := Ending()) as address:
        transport = GrpcTransport(Connection("grpc", address))
        call = transport.open(GenerationRequest(model="m", prompt="p"), None)
        next(call)
        call.close()  # the server has not ended it
        assert not ending.ended.is_set()
        ending.gate.set()
        transport.close()


@pytest.mark.parametrize("how", ["call", "reader", "close"])
async def test_asyncio_a_call_is_not_cancelled_once_its_final_response_has_come(how: str) -> None:
    with grpc_server(ending := Ending()) as address:
        transport = AsyncGrpcTransport(Connection("grpc", address))
        call = transport.open(GenerationRequest(model="m", prompt="p"), None)
        await call.__anext__()
        if how == "call":
            call.cancel()
        else:
            waiting = asyncio.create_task(call.close() if how == "close" else call.__anext__())  # type: ignore[arg-type]
            for _ in range(10):
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        inner = call._call
        del call
        gc.collect()
        with suppress(InvalidRequestError):
            await transport.server_live()
        ending.gate.set()
        assert await asyncio.to_thread(ending.ended.wait, 20) and not ending.was_cancelled
        assert await asyncio.wait_for(inner.code(), 20) == grpc.StatusCode.OK
        await transport.close()


def test_a_server_that_does_not_end_a_stream_is_not_waited_for_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_grpc, "_END_SECONDS", 0.05)
    with grpc_server(ending := Ending()) as address, Client(address, retries=ONCE) as client:
        assert [chunk.text for chunk in client.stream("p")] == ["a"]
        ending.gate.set()


async def test_asyncio_a_server_that_does_not_end_a_stream_is_not_waited_for_without_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport_grpc, "_END_SECONDS", 0.05)
    with grpc_server(ending := Ending()) as address:
        async with AsyncClient(address, retries=ONCE) as client:
            assert [chunk.text async for chunk in client.stream("p")] == ["a"]
        ending.gate.set()
