"""gRPC: one bidirectional stream (one RPC) per request, many streams per channel.

The streaming calls of `tritonclient` are not usable: its blocking client has one stream per client object,
so a cancellation would end every request of the client, and it leaks a thread for each cancelled
stream; its asyncio client drops `enable_empty_final_response`.  This module uses its channel and TLS
handling, although the channel is a private attribute (`_channel`).  Requests come as bytes from `grpc_request`, and
responses stay bytes for `StreamDecoder`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import grpc
import grpc.aio
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from inflight_client.connection import Connection
from inflight_client.errors import (
    DeadlineExceededError,
    InflightError,
    RequestCancelledError,
    ServerUnreachableError,
    code_of_message,
    error_for,
)
from inflight_client.questions import Question
from inflight_client.request import GenerationRequest
from inflight_client.stream_decoder import StreamDecoder
from inflight_client.wire import Columns, control_answer, grpc_control, grpc_request

__all__ = ["AsyncGrpcTransport", "GrpcTransport"]

# The server ends an overdue request with a better message; the client only makes sure that it ends.
_GRACE_SECONDS = 1.0
_END_SECONDS = 10.0  # for the server to end a stream after its final response
_STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


def _rpc_timeout(timeout: float | None) -> float | None:
    return None if timeout is None else timeout + _GRACE_SECONDS


def _rpc_error(error: grpc.RpcError, address: str, received: bool) -> InflightError:
    code, details = error.code().name, error.details() or error.code().name
    if code == "UNAVAILABLE":  # the connection failed: a model's errors arrive as responses
        what = "lost the connection to" if received else "cannot reach"
        return ServerUnreachableError(f"{what} {address} by gRPC: {details}")
    if code == "DEADLINE_EXCEEDED":
        return DeadlineExceededError(f"deadline exceeded: {address} did not end the request in time")
    return error_for(code, details)


def _triton_error(error: InferenceServerException, address: str) -> InflightError:
    """The error of a health or metadata call; Triton itself sets its status."""
    code, message = str(error.status()).removeprefix("StatusCode."), error.message()
    if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED") and code_of_message(message) != "UNAVAILABLE":
        return ServerUnreachableError(f"cannot reach {address} by gRPC: {message}")
    return error_for(code, message)


@contextlib.contextmanager
def _closed_channels(address: str, closed: Callable[[], bool]) -> Iterator[None]:
    """Turn grpc's errors for a call on a channel that another thread or task has closed into one RuntimeError."""
    try:
        yield
    except (ValueError, grpc.aio.UsageError) as error:
        if closed():
            raise RuntimeError(f"the client for {address} is closed; create a new one") from error
        raise


class _CallProgress:
    """State of a call; shared by the blocking and the asyncio call."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._received = False
        self._decoder = StreamDecoder()

    @property
    def _final(self) -> bool:
        return self._decoder.final

    def _columns(self, response: bytes) -> Columns:
        self._received = True
        return self._decoder.columns(response)

    def _end(self) -> None:
        if not self._final:
            raise ServerUnreachableError(f"{self._address} ended the stream without a final response")

    def _error(self, error: grpc.RpcError) -> InflightError:
        return _rpc_error(error, self._address, self._received)


class GrpcCall(_CallProgress):
    """Iterator over the outputs of a request.  Any thread can call `cancel`."""

    def __init__(self, call: Any, address: str) -> None:
        super().__init__(address)
        self._call = call
        self._ended = threading.Event()  # by the server; only after the final response

    def __iter__(self) -> GrpcCall:
        return self

    def __next__(self) -> Columns:
        if self._final and not self._is_ended():
            raise StopIteration
        try:
            response = next(self._call)
        except StopIteration:
            self._end()
            raise
        except grpc.RpcError as error:
            raise self._error(error) from None
        try:
            return self._columns(response)
        except InflightError:
            self.close()
            raise

    def _columns(self, response: bytes) -> Columns:
        try:
            return super()._columns(response)
        finally:
            if self._final:
                self._keep()

    def _keep(self) -> None:
        """Let the call live until the server has ended it, also if this object is dropped: grpc would cancel it."""
        ended = self._ended

        def end(kept: Any = self._call) -> None:
            ended.set()

        if not self._call.add_callback(end):
            end()

    def _is_ended(self) -> bool:
        """Wait for the server to end the call, which it does at once; if it does not, cancel."""
        if self._ended.wait(_END_SECONDS):
            return True
        self._call.cancel()
        return False

    def cancel(self) -> None:
        """Cancel, unless the final response has arrived: the server is then closing the stream anyway, and a
        cancellation that races with the last response can make Triton 24.10 keep the model."""
        if not self._final:
            self._call.cancel()

    def close(self) -> None:
        """As `cancel`, and wait for the server to close the stream."""
        if self._final:
            self._is_ended()
        else:
            self._call.cancel()


class GrpcTransport:
    """Blocking and thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self.address = connection.address
        self._headers = connection.grpc_headers()
        self._timeout = connection.connect_timeout
        self._client = tritonclient.grpc.InferenceServerClient(**connection.grpc_client_options())
        self._infer = self._client._channel.stream_stream(_STREAM_METHOD)
        self._closed = threading.Event()

    def open(self, request: GenerationRequest, timeout: float | None) -> GrpcCall:
        """Send a request; `timeout` is the number of seconds it has left."""
        return self._send(grpc_request(request, timeout), _rpc_timeout(timeout), request.trace_headers)

    def control(self, model: str, question: Question, timeout: float) -> str:
        """The text that answers a question."""
        return control_answer([columns for columns in self._send(grpc_control(model, question), timeout) if columns])

    def _send(
        self, message: bytes, timeout: float | None, headers: Mapping[str, str] = MappingProxyType({})
    ) -> GrpcCall:
        metadata = (*self._headers.items(), *headers.items())
        # The end of the iterator half-closes the stream, so the server ends it after the last response.
        with _closed_channels(self.address, self._closed.is_set):
            return GrpcCall(self._infer(iter((message,)), metadata=metadata, timeout=timeout), self.address)

    def server_live(self) -> bool:
        return bool(self._unary("is_server_live"))

    def server_ready(self) -> bool:
        return bool(self._unary("is_server_ready"))

    def model_ready(self, model: str) -> bool:
        return bool(self._unary("is_model_ready", model))

    def server_metadata(self) -> dict[str, Any]:
        return self._unary("get_server_metadata", as_json=True)

    def model_metadata(self, model: str) -> dict[str, Any]:
        return self._unary("get_model_metadata", model, as_json=True)

    def repository_index(self) -> list[dict[str, Any]]:
        return list(self._unary("get_model_repository_index", as_json=True).get("models", []))

    def _unary(self, method: str, *args: Any, **options: Any) -> Any:
        call = getattr(self._client, method)
        try:
            with _closed_channels(self.address, self._closed.is_set):
                return call(*args, headers=self._headers, client_timeout=self._timeout, **options)
        except InferenceServerException as error:
            raise _triton_error(error, self.address) from None

    def close(self) -> None:
        self._closed.set()
        self._client.close()


class AsyncGrpcCall(_CallProgress):
    """Async iterator over the outputs of a request.

    Args:
        closed: set when the whole channel was closed, which cancels every call on it.
    """

    def __init__(self, call: Any, address: str, closed: asyncio.Event) -> None:
        super().__init__(address)
        self._call = call
        self._cancelled = False
        self._closed = closed

    def __aiter__(self) -> AsyncGrpcCall:
        return self

    async def __anext__(self) -> Columns:
        try:
            response = await (self._last() if self._final else self._call.read())
        except grpc.RpcError as error:
            raise self._error(error) from None
        except asyncio.CancelledError:
            if self._cancelled or self._closed.is_set():  # the call was cancelled, not the reading task
                raise RequestCancelledError("the request was cancelled by this client") from None
            raise
        if response is grpc.aio.EOF:
            self._end()
            raise StopAsyncIteration
        try:
            return self._columns(response)
        except InflightError:
            await self.close()
            raise

    def cancel(self) -> None:
        """As `GrpcCall.cancel`."""
        if not self._final:
            self._cancelled = True
            self._call.cancel()

    async def close(self) -> None:
        """As `GrpcCall.close`."""
        if self._final:
            with contextlib.suppress(grpc.RpcError):
                await self._last()
        else:
            self.cancel()

    async def _last(self) -> Any:
        """Read to the end, which comes at once; if it does not, cancel."""

        async def drain() -> None:
            while await self._call.read() is not grpc.aio.EOF:
                pass

        with contextlib.suppress(asyncio.TimeoutError):
            # A task that is cancelled in `read` cancels the call.
            await asyncio.wait_for(asyncio.shield(drain()), _END_SECONDS)
            return grpc.aio.EOF
        self._call.cancel()
        return grpc.aio.EOF

    def __del__(self) -> None:
        # A blocking call is cancelled with its object; here grpc's own tasks keep the call alive.
        if not self._final and not self._call.done():
            self._call.cancel()


class AsyncGrpcTransport:
    """For one event loop; create it in that loop."""

    def __init__(self, connection: Connection) -> None:
        self.address = connection.address
        self._headers = connection.grpc_headers()
        self._metadata = tuple(self._headers.items())
        self._timeout = connection.connect_timeout
        self._client = tritonclient.grpc.aio.InferenceServerClient(**connection.grpc_client_options())
        # On the wire, a stream with one request equals a single request; grpc needs two tasks less for it.
        self._infer = self._client._channel.unary_stream(_STREAM_METHOD)
        self._closed = asyncio.Event()

    def open(self, request: GenerationRequest, timeout: float | None) -> AsyncGrpcCall:
        """As `GrpcTransport.open`."""
        return self._send(grpc_request(request, timeout), _rpc_timeout(timeout), request.trace_headers)

    async def control(self, model: str, question: Question, timeout: float) -> str:
        """As `GrpcTransport.control`."""
        call = self._send(grpc_control(model, question), timeout)
        return control_answer([columns async for columns in call if columns])

    def _send(
        self, message: bytes, timeout: float | None, headers: Mapping[str, str] = MappingProxyType({})
    ) -> AsyncGrpcCall:
        with _closed_channels(self.address, self._closed.is_set):
            call = self._infer(message, metadata=(*self._metadata, *headers.items()), timeout=timeout)
        return AsyncGrpcCall(call, self.address, self._closed)

    async def server_live(self) -> bool:
        return bool(await self._unary("is_server_live"))

    async def server_ready(self) -> bool:
        return bool(await self._unary("is_server_ready"))

    async def model_ready(self, model: str) -> bool:
        return bool(await self._unary("is_model_ready", model))

    async def server_metadata(self) -> dict[str, Any]:
        return await self._unary("get_server_metadata", as_json=True)

    async def model_metadata(self, model: str) -> dict[str, Any]:
        return await self._unary("get_model_metadata", model, as_json=True)

    async def repository_index(self) -> list[dict[str, Any]]:
        return list((await self._unary("get_model_repository_index", as_json=True)).get("models", []))

    async def _unary(self, method: str, *args: Any, **options: Any) -> Any:
        call = getattr(self._client, method)
        try:
            with _closed_channels(self.address, self._closed.is_set):
                return await call(*args, headers=self._headers, client_timeout=self._timeout, **options)
        except InferenceServerException as error:
            raise _triton_error(error, self.address) from None

    async def close(self) -> None:
        self._closed.set()
        await self._client.close()
