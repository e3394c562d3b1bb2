"""The two clients.  They have the same methods; those of `AsyncClient` are awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from inflight_client.connection import Connection, ConnectionOptions, Protocol
from inflight_client.errors import DeadlineExceededError, ServerUnreachableError
from inflight_client.request import GenerationRequest, Message, RequestOptions
from inflight_client.results import GenerationResult
from inflight_client.retry import RetryPolicy
from inflight_client.stream import AsyncStream, Stream
from inflight_client.transport_grpc import AsyncGrpcTransport, GrpcTransport
from inflight_client.transport_http import AsyncHttpTransport, HttpTransport
from inflight_client.wire import control_parameters

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Unpack

    InputIds = Sequence[int] | np.ndarray

__all__ = ["AsyncClient", "Client"]


class _BaseClient:
    def __init__(
        self,
        url: str | None = None,
        *,
        protocol: Protocol = "grpc",
        model: str = "demo",
        timeout: float | None = None,
        retries: RetryPolicy | None = None,
        **options: Unpack[ConnectionOptions],
    ) -> None:
        """Connects on the first call.

        Args:
            url: `host:port`; None means 127.0.0.1 and Triton's default port for the protocol.
            protocol: "grpc" (port 8001) or "http" (port 8000).
            model: default model.
            timeout: default limit for a request in seconds; None for no limit.
            retries: what to do while the server is unavailable; None means `RetryPolicy()`.
            options: headers and TLS, see `ConnectionOptions`.

        Raises:
            ValueError, TypeError: see `Connection.build`.
        """
        self.connection = Connection.build(url, protocol, options)
        self.model = model
        self.timeout = timeout
        self.retries = retries or RetryPolicy()
        self._closed = False
        self._connect()

    def _connect(self) -> None:
        raise NotImplementedError

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the client for {self.connection.address} is closed; create a new one")

    def _request(self, prompt: str | None, messages: Any, input_ids: Any, options: Any) -> GenerationRequest:
        return GenerationRequest.build(prompt, messages, input_ids, options, model=self.model, timeout=self.timeout)


def _pauses(timeout: float) -> Iterator[float]:
    """Seconds between two checks of a server that is starting, growing to half a second."""
    deadline, pause = time.monotonic() + timeout, 0.05
    while (left := deadline - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(0.5, pause * 1.5)


def _not_ready(timeout: float, reason: str) -> DeadlineExceededError:
    return DeadlineExceededError(f"not ready after {timeout:g} s: {reason}")


class Client(_BaseClient):
    """Blocking client: `with Client("host:8001", model="demo") as client: ...`.

    Threads may share it; requests are independent of each other and are cancelled one by one.
    """

    def _connect(self) -> None:
        transport = GrpcTransport if self.connection.protocol == "grpc" else HttpTransport
        self._opened: GrpcTransport | HttpTransport = transport(self.connection)

    @property
    def _transport(self) -> GrpcTransport | HttpTransport:
        self._check_open()
        return self._opened

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: InputIds | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Send a request and return the iterator of its chunks.

        Args:
            prompt: text to continue.
            messages: a chat of {"role": ..., "content": ...}; the server applies the chat template.
            input_ids: token ids of the prompt.
            options: see `RequestOptions`.

        Raises:
            ValueError, TypeError: see `GenerationRequest.build`.  Errors of the server are raised by
                the iterator.
        """
        return Stream(self._request(prompt, messages, input_ids, options), self.retries, self._transport.open)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: InputIds | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult:
        """Send a request and wait for the complete answer; arguments as in `stream`.

        Raises:
            InflightError: the request failed; `partial` has what arrived before.
        """
        stream = self.stream(prompt, messages=messages, input_ids=input_ids, **options)
        with stream:
            for _ in stream:
                pass
        return stream.result()

    def health(self) -> bool:
        """Whether a server answers and is live."""
        try:
            return self._transport.server_live()
        except ServerUnreachableError:
            return False

    def ready(self, model: str | None = None) -> bool:
        """Whether a server answers and the model (default: the client's) accepts requests."""
        return self._unready(model or self.model) is None

    def wait_until_ready(self, timeout: float = 60.0, model: str | None = None) -> None:
        """Block until `ready()`.

        Raises:
            DeadlineExceededError: not ready after `timeout` seconds; the message says why.
        """
        model, pauses = model or self.model, _pauses(timeout)
        while (reason := self._unready(model)) is not None:
            pause = next(pauses, None)
            if pause is None:
                raise _not_ready(timeout, reason)
            time.sleep(pause)

    def _unready(self, model: str) -> str | None:
        try:
            return None if self._transport.model_ready(model) else f"model {model!r} is not ready"
        except ServerUnreachableError as error:
            return error.message

    def metadata(self, model: str | None = None) -> dict[str, Any]:
        """Name, versions, inputs and outputs of the model (default: the client's)."""
        return self._transport.model_metadata(model or self.model)

    def server_metadata(self) -> dict[str, Any]:
        """Name, version and extensions of the server."""
        return self._transport.server_metadata()

    def control(self, name: str, model: str | None = None, timeout: float = 60.0, admin_key: str | None = None) -> str:
        """Ask the model's engine for something other than text, such as `"step_trace"`.

        Args:
            name: value of the request parameter `control`, see docs/wire-contract.md.
            model: None for the client's.
            timeout: seconds to wait for the answer.
            admin_key: what `inflight serve` printed at its start; None for a server without one.

        Raises:
            InflightError: no server answers, or it refuses.
        """
        return self._transport.control(model or self.model, control_parameters(name, admin_key), timeout)

    def close(self) -> None:
        """Cancel open requests and close the connections; further calls raise RuntimeError."""
        if not self._closed:
            self._closed = True
            self._opened.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(_BaseClient):
    """Client for one event loop: `async with AsyncClient("host:8001", model="demo") as client: ...`."""

    def _connect(self) -> None:
        self._opened: AsyncGrpcTransport | AsyncHttpTransport | None = None

    @property
    def _transport(self) -> AsyncGrpcTransport | AsyncHttpTransport:
        """Created on first use: a client may be constructed before its event loop runs."""
        self._check_open()
        if self._opened is None:
            grpc = self.connection.protocol == "grpc"
            self._opened = AsyncGrpcTransport(self.connection) if grpc else AsyncHttpTransport(self.connection)
        return self._opened

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: InputIds | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncStream:
        """As `Client.stream`, but not awaited: `async for chunk in client.stream(...)`."""
        return AsyncStream(self._request(prompt, messages, input_ids, options), self.retries, self._transport.open)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: InputIds | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult:
        """As `Client.generate`."""
        stream = self.stream(prompt, messages=messages, input_ids=input_ids, **options)
        async with stream:
            async for _ in stream:
                pass
        return stream.result()

    async def health(self) -> bool:
        """As `Client.health`."""
        try:
            return await self._transport.server_live()
        except ServerUnreachableError:
            return False

    async def ready(self, model: str | None = None) -> bool:
        """As `Client.ready`."""
        return await self._unready(model or self.model) is None

    async def wait_until_ready(self, timeout: float = 60.0, model: str | None = None) -> None:
        """As `Client.wait_until_ready`."""
        model, pauses = model or self.model, _pauses(timeout)
        while (reason := await self._unready(model)) is not None:
            pause = next(pauses, None)
            if pause is None:
                raise _not_ready(timeout, reason)
            await asyncio.sleep(pause)

    async def _unready(self, model: str) -> str | None:
        try:
            return None if await self._transport.model_ready(model) else f"model {model!r} is not ready"
        except ServerUnreachableError as error:
            return error.message

    async def metadata(self, model: str | None = None) -> dict[str, Any]:
        """As `Client.metadata`."""
        return await self._transport.model_metadata(model or self.model)

    async def server_metadata(self) -> dict[str, Any]:
        """As `Client.server_metadata`."""
        return await self._transport.server_metadata()

    async def control(
        self, name: str, model: str | None = None, timeout: float = 60.0, admin_key: str | None = None
    ) -> str:
        """As `Client.control`."""
        return await self._transport.control(model or self.model, control_parameters(name, admin_key), timeout)

    async def close(self) -> None:
        """As `Client.close`."""
        if not self._closed:
            self._closed = True
            if self._opened is not None:
                await self._opened.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
