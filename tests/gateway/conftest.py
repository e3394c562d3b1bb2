"""A gateway on a port of its own, in the test's event loop, in front of a scripted client."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import httpx
import pytest
import uvicorn
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from scripted_client import ScriptedClient

from inflight_gateway.app import build_app
from inflight_gateway.connections import IDLE_SECONDS, ClientConnection
from inflight_gateway.gateway import Gateway
from inflight_gateway.handover import HandoverUpstream, PrefillTriton
from inflight_gateway.metrics import Metrics
from inflight_gateway.options import GatewayOptions
from inflight_gateway.replicas import Replicas
from inflight_gateway.upstream import AnyUpstream, Upstream


class RunningGateway:
    """A gateway that answers.

    Attributes:
        client: behind it.
        url: in front of it.
        http: a client for it.
        openai: OpenAI's own.
    """

    def __init__(self, client: ScriptedClient, gateway: Gateway, url: str, server: uvicorn.Server) -> None:
        self.shutdown = server.shutdown
        self.client = client
        self.gateway = gateway
        self.url = url
        self.http = httpx.AsyncClient(base_url=url, timeout=20, verify=False)  # TLS certificates take long to load

    @functools.cached_property
    def openai(self) -> AsyncOpenAI:
        http = DefaultAsyncHttpxClient(verify=False)
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="key", max_retries=0, http_client=http)

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **options)

    async def close(self) -> None:
        await self.http.aclose()
        if "openai" in vars(self):
            await self.openai.close()


async def end(server: uvicorn.Server) -> None:
    """Without the tenth of a second that `Server.shutdown` waits for connections, if none is open."""
    state = server.server_state
    for _ in range(100):
        if not state.connections and not state.tasks:
            break
        await asyncio.sleep(0)  # the client's end of a connection is closed, and the server hears of it
    else:
        return await server.shutdown()
    for listener in server.servers:
        listener.close()
        await listener.wait_closed()
    await server.lifespan.shutdown()


@contextlib.asynccontextmanager
async def running(
    client: ScriptedClient,
    replicas: Mapping[str, ScriptedClient] = MappingProxyType({}),
    tls: tuple[str, str] | None = None,
    prefills: Sequence[ScriptedClient] = (),
    **options: Any,
) -> AsyncIterator[RunningGateway]:
    """`replicas`: clients of addresses other than `client`.  `tls`: files of a key and a certificate.

    `prefills`: clients of Tritons for prompts; the others continue.
    """
    chosen = GatewayOptions(**options)
    upstream: AnyUpstream = Upstream(chosen, client)
    if prefills:
        named = [PrefillTriton(f"p{index}:1", Upstream(chosen, one)) for index, one in enumerate(prefills)]
        metrics = Metrics()
        upstream = HandoverUpstream(upstream, named, chosen.handover, metrics.handed_over, metrics.continued_after)
    gateway = Gateway(chosen, upstream, Replicas(chosen, upstream, lambda address: replicas.get(address, client)))
    if prefills:
        gateway.metrics = metrics
    config = uvicorn.Config(
        build_app(chosen, gateway),
        http=ClientConnection,
        port=0,
        log_config=None,
        lifespan="on",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=IDLE_SECONDS,
        ssl_keyfile=tls and tls[0],
        ssl_certfile=tls and tls[1],
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()  # without signal handlers, which belong to pytest
    port = server.servers[0].sockets[0].getsockname()[1]
    front = RunningGateway(client, gateway, f"http://127.0.0.1:{port}", server)
    try:
        yield front
    finally:
        await front.close()
        if server.servers[0].is_serving():
            await end(server)


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Any]]:
    """Start a gateway: `await start(client or script, **options)`; it ends with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def begin(client: Any, **options: Any) -> RunningGateway:
            scripted = client if isinstance(client, ScriptedClient) else ScriptedClient(client)
            return await stack.enter_async_context(running(scripted, **options))

        yield begin


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
