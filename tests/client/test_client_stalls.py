"""Streams whose server falls silent go on elsewhere, unless it is well."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from client_cluster import FAST, AsyncCluster, Cluster, answer, request

from inflight_client import (
    AsyncStream,
    DeadlineExceededError,
    InflightError,
    InvalidRequestError,
    RequestCancelledError,
    ServerUnreachableError,
    Stream,
    UnavailableError,
)
from inflight_client.connection import Connection
from inflight_client.servers import AsyncServers, BlockingServers
from inflight_client.transport_http import _LoopThread


def checked(cluster: Cluster, after: float = 100.0) -> threading.Event:
    """Looks at the watched streams as the client's thread does, as if `after` seconds had passed."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.01):
            for stream in list(cluster.watched):
                stream.check_stall(time.monotonic() + after, {})

    threading.Thread(target=look, daemon=True).start()
    return done


@pytest.mark.parametrize("received", [0, 1])
def test_a_stream_that_waits_in_vain_goes_on_elsewhere(received: int) -> None:
    cluster = Cluster([[7, 8]], [(received, threading.Event)])
    cluster.is_well = received > 0  # silence before the output may be a queue: then the server is asked
    done = checked(cluster)
    assert answer(cluster).token_ids == [7, 8]
    done.set()
    assert cluster.opened == [0, 1]


def test_a_request_in_a_queue_waits_as_long_as_its_server_is_well() -> None:
    cluster = Cluster([[7, 8]], [(0, threading.Event)])
    asked = threading.Event()
    cluster.responds = lambda index, model: asked.set() or True  # type: ignore[method-assign]
    done = checked(cluster)
    stream = Stream(request(), FAST, cluster)
    threading.Thread(target=lambda: (asked.wait(20), stream.cancel()), daemon=True).start()
    with pytest.raises(RequestCancelledError):
        next(stream)
    done.set()
    assert cluster.opened == [0]


@pytest.mark.parametrize("received", [0, 1])
async def test_asyncio_a_stream_that_waits_in_vain_goes_on_elsewhere(received: int) -> None:
    cluster = AsyncCluster([[7, 8]], [(received, threading.Event)])
    cluster.is_well = received > 0
    stream = AsyncStream(request(), FAST, cluster)
    assert [chunk.token_ids async for chunk in stream] == [[7], [8]]
    assert cluster.opened == [0, 1]


async def test_asyncio_every_attempt_is_watched() -> None:
    cluster = AsyncCluster([[7, 8, 9]], [(1, threading.Event), (1, threading.Event)])
    stream = AsyncStream(request(), FAST, cluster)
    assert [chunk.token_ids async for chunk in stream] == [[7], [8], [9]]
    assert len(cluster.opened) == 3


async def test_asyncio_a_reader_that_takes_its_time_is_no_stall() -> None:
    cluster = AsyncCluster([[7, 8]], [])
    stream = AsyncStream(request(), FAST, cluster)
    await anext(stream)
    stream.check_stall(time.monotonic() + 100)  # no task waits for a response
    assert [chunk.token_ids async for chunk in stream] == [[8]]
    assert cluster.opened == [0]


async def test_asyncio_a_request_in_a_queue_waits_as_long_as_its_server_is_well() -> None:
    cluster = AsyncCluster([[7, 8]], [(0, threading.Event)])
    stream = AsyncStream(request(), FAST, cluster)
    calls = []

    async def ready(index: int, model: str) -> bool:
        calls.append(index)
        if len(calls) == 2:
            stream.cancel()
            stream.check_stall(time.monotonic() + 100)  # before the reader hears of it
        return True

    cluster.responds = ready  # type: ignore[method-assign]
    with pytest.raises(RequestCancelledError):
        await anext(stream)
    assert (cluster.opened, calls) == ([0], [0, 0])


@pytest.mark.parametrize(
    ("is_ready", "error", "responds"),
    [
        (True, None, True),
        (True, InvalidRequestError("control='model': must be ..."), True),
        (True, DeadlineExceededError("deadline exceeded"), False),
        (True, ServerUnreachableError("lost the connection"), False),
        (True, UnavailableError("Stub process 'm_0_0' is not healthy."), False),
        (False, None, False),
    ],
)
async def test_a_server_responds_if_its_model_answers_anything(
    is_ready: bool, error: Exception | None, responds: bool
) -> None:
    """Triton reports a model as ready whose stub is stopped."""

    class Transport:
        def model_ready(self, model: str) -> bool:
            return is_ready

        def control(self, model: str, question: Any, timeout: float) -> str:
            assert question.parameters == {"control": "model"}
            if error is not None:
                raise error
            return "{}"

        def close(self) -> None: ...

    class AsyncTransport(Transport):
        async def model_ready(self, model: str) -> bool:  # type: ignore[override]
            return Transport.model_ready(self, model)

        async def control(self, model: str, question: Any, timeout: float) -> str:  # type: ignore[override]
            return Transport.control(self, model, question, timeout)

    connections = [Connection.build("127.0.0.1:1", "grpc", {})]
    blocking, asynchronous = BlockingServers(connections, None), AsyncServers(connections)
    blocking._opened[0], asynchronous._opened[0] = Transport(), AsyncTransport()
    assert blocking.responds(0, "m") is blocking.any_responds("m") is responds
    assert await asynchronous.responds(0, "m") is await asynchronous.any_responds("m") is responds
    blocking.close()
    assert not blocking.responds(0, "m")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_client_that_is_closed_while_a_server_is_asked_gets_no_answer(protocol: str) -> None:
    """The thread or task that asks for a stalled stream goes on to the others."""
    connections = [Connection.build("127.0.0.1:1", protocol, {})]
    blocking, asynchronous = BlockingServers(connections, None), AsyncServers(connections)
    blocking._transport(0).close()
    await asynchronous._transport(0).close()
    assert not blocking.responds(0, "m") and not await asynchronous.responds(0, "m")
    asked = request()
    for servers in (blocking, asynchronous):
        with pytest.raises(RuntimeError, match=r"the client for 127\.0\.0\.1:1 is closed; create a new one"):
            servers.open(0, asked, None)
    gc.collect()  # what could not be sent has nothing to clean up


@pytest.mark.parametrize("what", ["ready", "stream"])
def test_a_client_can_be_closed_while_a_server_takes_its_time_over_http(what: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        servers = BlockingServers([Connection.build(f"127.0.0.1:{listener.getsockname()[1]}", "http", {})], None)
        if what == "ready":
            asked = pool.submit(servers.responds, 0, "m")
        else:
            asked = pool.submit(next, servers.open(0, request(), None))  # type: ignore[arg-type]
        taken, _ = listener.accept()
        with taken:
            assert taken.recv(1)
            servers.close()
            if what == "ready":
                assert asked.result(20) is False
            else:
                with pytest.raises((InflightError, RuntimeError)):  # never an answer that looks whole
                    asked.result(20)


def test_what_runs_over_http_ends_with_its_client_and_nothing_more_begins() -> None:
    thread, begun, closing, go_on = _LoopThread("host:1"), threading.Event(), threading.Event(), threading.Event()
    closed_error = "the client for host:1 is closed; create a new one"

    async def without_end() -> None:
        begun.set()
        await asyncio.Event().wait()

    async def last() -> None:
        closing.set()
        await asyncio.to_thread(go_on.wait, 20)

    with ThreadPoolExecutor(2) as pool:
        runs = pool.submit(thread.run, without_end())
        assert begun.wait(20)
        closed = pool.submit(thread.close, last())
        assert closing.wait(20)
        for _ in range(2):  # while it closes, and after
            with pytest.raises(RuntimeError, match=closed_error):
                thread.run(asyncio.sleep(0))
            go_on.set()
            closed.result(20)
        with pytest.raises(RuntimeError, match=closed_error):
            runs.result(20)
    thread.close(last())
