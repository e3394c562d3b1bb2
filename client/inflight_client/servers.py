"""The servers of a client: one transport for each, opened on first use."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from inflight_client.connection import Connection
from inflight_client.endpoints import Endpoints, Routing
from inflight_client.errors import DeadlineExceededError, InflightError, ServerUnreachableError, UnavailableError
from inflight_client.questions import model_question
from inflight_client.request import GenerationRequest
from inflight_client.stalls import Stalls
from inflight_client.transport_grpc import AsyncGrpcCall, AsyncGrpcTransport, GrpcCall, GrpcTransport
from inflight_client.transport_http import AsyncHttpCall, AsyncHttpTransport, HttpCall, HttpTransport

if TYPE_CHECKING:
    from inflight_client.stream import Stream

__all__ = ["AsyncServers", "BlockingServers"]

_T = TypeVar("_T")
_ANSWER_SECONDS = 5.0  # for a model to answer a question that needs no engine
_Blocking = GrpcTransport | HttpTransport
_Async = AsyncGrpcTransport | AsyncHttpTransport


class _BaseServers:
    """The common part of both kinds.

    Args:
        connections: the preferred one first.
        routing: chooses the server of a request; None: the order of preference.

    Attributes:
        endpoints: chooses the next server.
    """

    def __init__(self, connections: Sequence[Connection], routing: Routing | None = None) -> None:
        self.endpoints = Endpoints(len(connections), routing=routing)
        self._connections = list(connections)
        self._opened: dict[int, Any] = {}
        self._closed = False

    def address(self, index: int) -> str:
        """`host:port`."""
        return self._connections[index].address

    def order(self) -> list[int]:
        """The indices of all servers, the one for the next attempt first.

        Raises:
            RuntimeError: they are closed.
        """
        self._check_open()
        first = self.endpoints.choose()
        return [first, *(index for index in range(len(self._connections)) if index != first)]

    def _check_open(self) -> None:
        if self._closed:
            addresses = ", ".join(connection.address for connection in self._connections)
            raise RuntimeError(f"the client for {addresses} is closed; create a new one")


@contextlib.contextmanager
def _kept(failures: list[InflightError]) -> Iterator[None]:
    """Catch an error that another server may not have, and append it to `failures`."""
    try:
        yield
    except InflightError as error:
        if not isinstance(error, UnavailableError) and error.code != "NOT_FOUND":
            raise
        failures.append(error)


@contextlib.contextmanager
def _any_answer() -> Iterator[None]:
    """Catch a refusal by the model, which shows that it answers; silence and Triton's own errors are raised."""
    try:
        yield
    except (UnavailableError, DeadlineExceededError):  # Triton: "Stub process ... is not healthy"
        raise
    except InflightError:
        pass


def _most_telling(failures: list[InflightError]) -> InflightError:
    """The first error of a server that could be reached, else the last one."""
    return next((error for error in failures if not isinstance(error, ServerUnreachableError)), failures[-1])


class BlockingServers(_BaseServers):
    """For blocking clients; thread-safe.

    Args:
        stall_timeout: of the client's `RetryPolicy`.
    """

    def __init__(
        self, connections: Sequence[Connection], stall_timeout: float | None, routing: Routing | None = None
    ) -> None:
        super().__init__(connections, routing)
        self._lock = threading.Lock()  # guards `_opened`
        self._stalls = None if stall_timeout is None else Stalls(stall_timeout)

    def _transport(self, index: int) -> _Blocking:
        with self._lock:
            self._check_open()
            if index not in self._opened:
                connection = self._connections[index]
                grpc = connection.protocol == "grpc"
                self._opened[index] = GrpcTransport(connection) if grpc else HttpTransport(connection)
            transport: _Blocking = self._opened[index]
            return transport

    def open(self, index: int, request: GenerationRequest, timeout: float | None) -> GrpcCall | HttpCall:
        """Send a request; `timeout` is the number of seconds it has left."""
        return self._transport(index).open(request, timeout)

    def watch(self, stream: Stream) -> None:
        """Check periodically whether the stream has stalled."""
        if self._stalls is not None:
            self._stalls.watch(stream)

    def first(self, call: Callable[[_Blocking], _T]) -> _T:
        """The answer of the first server that is reachable and has the model (a stopping server has none).

        Raises:
            InflightError: no server answers; `ServerUnreachableError` if none can be reached.
        """
        failures: list[InflightError] = []
        for index in self.order():
            with _kept(failures):
                return call(self._transport(index))
        raise _most_telling(failures)

    def unready(self, model: str) -> str | None:
        """Why no server serves the model; None if one does."""
        reasons = []
        for index in self.order():
            reason = self._reason(index, model)
            if reason is None:
                return None
            reasons.append(reason)
        return "; ".join(reasons)

    def _reason(self, index: int, model: str) -> str | None:
        try:
            ready = self._transport(index).model_ready(model)
        except ServerUnreachableError as error:
            return error.message
        return None if ready else f"model {model!r} is not ready"

    def responds(self, index: int, model: str) -> bool:
        """Whether the server reports that it serves the model, and the model answers: Triton also reports a model as
        ready whose stub process is stopped or hangs."""
        try:
            if not self._transport(index).model_ready(model):
                return False
            with _any_answer():
                self._transport(index).control(model, model_question(), _ANSWER_SECONDS)
        except (InflightError, RuntimeError):  # it cannot be reached, or the client is closed
            return False
        return True

    def any_responds(self, model: str) -> bool:
        """Whether a server `responds`."""
        return any(self.responds(index, model) for index in self.order())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            opened, self._opened = self._opened, {}
        for transport in opened.values():
            transport.close()


class AsyncServers(_BaseServers):
    """For one event loop; can be created before it runs."""

    def _transport(self, index: int) -> _Async:
        self._check_open()
        if index not in self._opened:
            connection = self._connections[index]
            grpc = connection.protocol == "grpc"
            self._opened[index] = AsyncGrpcTransport(connection) if grpc else AsyncHttpTransport(connection)
        transport: _Async = self._opened[index]
        return transport

    def open(self, index: int, request: GenerationRequest, timeout: float | None) -> AsyncGrpcCall | AsyncHttpCall:
        """As `BlockingServers.open`."""
        return self._transport(index).open(request, timeout)

    def watch(self, stream: Any) -> None:
        """An `AsyncStream` watches itself."""

    async def first(self, call: Callable[[_Async], Awaitable[_T]]) -> _T:
        """As `BlockingServers.first`."""
        failures: list[InflightError] = []
        for index in self.order():
            with _kept(failures):
                return await call(self._transport(index))
        raise _most_telling(failures)

    async def unready(self, model: str) -> str | None:
        """As `BlockingServers.unready`."""
        reasons = []
        for index in self.order():
            reason = await self._reason(index, model)
            if reason is None:
                return None
            reasons.append(reason)
        return "; ".join(reasons)

    async def _reason(self, index: int, model: str) -> str | None:
        try:
            ready = await self._transport(index).model_ready(model)
        except ServerUnreachableError as error:
            return error.message
        return None if ready else f"model {model!r} is not ready"

    async def responds(self, index: int, model: str) -> bool:
        """As `BlockingServers.responds`."""
        try:
            if not await self._transport(index).model_ready(model):
                return False
            with _any_answer():
                await self._transport(index).control(model, model_question(), _ANSWER_SECONDS)
        except (InflightError, RuntimeError):
            return False
        return True

    async def any_responds(self, model: str) -> bool:
        """Whether a server `responds`."""
        for index in self.order():
            if await self.responds(index, model):
                return True
        return False

    async def close(self) -> None:
        self._closed = True
        opened, self._opened = self._opened, {}
        for transport in opened.values():
            await transport.close()
