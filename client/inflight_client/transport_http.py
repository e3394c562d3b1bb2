"""HTTP: `/generate_stream` with server-sent events, one connection per running request.

There is one implementation, on asyncio.  The blocking client runs it in a thread of its own, because
another thread could not cancel a blocking read before its first byte.

    pump task --Columns | error | _END--> queue --> call.__next__
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2

from inflight_client.connection import Connection
from inflight_client.errors import (
    DeadlineExceededError,
    RequestCancelledError,
    ServerError,
    ServerUnreachableError,
)
from inflight_client.questions import Question
from inflight_client.request import GenerationRequest
from inflight_client.wire import Columns, control_answer, http_body, http_columns, http_control, http_error

__all__ = ["AsyncHttpTransport", "HttpTransport"]

_GRACE_SECONDS = 1.0  # as in `transport_grpc`
_LOOK_SECONDS = 0.5  # between two looks at signals
_END = object()
_T = TypeVar("_T")


class _Session:
    """The HTTP client of one event loop; create it in that loop."""

    def __init__(self, connection: Connection) -> None:
        self.address = connection.address
        self._http = httpx2.AsyncClient(
            base_url=connection.base_url,
            headers=connection.headers,
            verify=connection.tls_context() if connection.ssl else False,
            trust_env=not connection.is_loopback,
            # The next token can take long, and every running request needs a connection.
            timeout=httpx2.Timeout(None, connect=connection.connect_timeout),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=32),
        )
        self._timeout = connection.connect_timeout
        self._closed = False

    def check_open(self) -> None:
        """Raise RuntimeError if the client is closed."""
        if self._closed:
            raise _closed_error(self.address)

    async def generate(self, request: GenerationRequest, timeout: float | None) -> AsyncIterator[Columns]:
        """The outputs of a request, response by response; closing the iterator closes the connection."""
        path = f"/v2/models/{quote(request.model, safe='')}/generate_stream"
        received = False
        try:
            body, headers = http_body(request, timeout), request.trace_headers
            async with self._http.stream("POST", path, json=body, headers=headers) as response:
                received = True
                if response.status_code != 200:
                    raise http_error(response.status_code, (await response.aread()).decode("utf-8", "replace"))
                async for event in httpx2.EventSource(response, max_event_size=None):
                    yield http_columns(event.data)
        except httpx2.SSEError as error:
            raise ServerError(f"{self.address}: {error}") from None
        except httpx2.TransportError as error:
            what = "lost the connection to" if received else "cannot reach"
            raise ServerUnreachableError(f"{what} {self.address} by HTTP: {_reason(error)}") from None

    async def pump(self, request: GenerationRequest, timeout: float | None, put: Callable[[Any], None]) -> None:
        """Run a request and pass its outputs or its error to `put`."""

        async def forward() -> None:
            async for columns in self.generate(request, timeout):
                put(columns)

        try:
            await asyncio.wait_for(forward(), None if timeout is None else timeout + _GRACE_SECONDS)
        except asyncio.TimeoutError:
            put(DeadlineExceededError(f"deadline exceeded: {self.address} did not end the request in time"))
        except Exception as error:  # raised again by the reader of the outputs
            put(error)

    async def is_ok(self, path: str) -> bool:
        """Whether the answer to a GET has status 200."""
        return (await self._request("GET", path, self._timeout)).status_code == 200

    async def json(self, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> dict[str, Any]:
        """The JSON object that answers a GET, or a POST of `body`."""
        result: dict[str, Any] = await self._json(dict, path, body, timeout or self._timeout)
        return result

    async def json_list(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The JSON list that answers a POST of `body`."""
        result: list[dict[str, Any]] = await self._json(list, path, body, self._timeout)
        return result

    async def _json(self, kind: type[Any], path: str, body: dict[str, Any] | None, timeout: float) -> Any:
        response = await self._request("GET" if body is None else "POST", path, timeout, json=body)
        if response.status_code != 200:
            raise http_error(response.status_code, response.text)
        try:
            result = response.json()
        except ValueError:
            result = None
        if not isinstance(result, kind):
            what = "object" if kind is dict else "list"
            raise ServerError(f"the answer of {self.address} to {path} is not a JSON {what}: {response.text[:200]!r}")
        return result

    async def _request(self, method: str, path: str, timeout: float, **options: Any) -> httpx2.Response:
        self.check_open()
        try:
            return await self._http.request(method, path, timeout=timeout, **options)
        except httpx2.TransportError as error:
            raise ServerUnreachableError(f"cannot reach {self.address} by HTTP: {_reason(error)}") from None

    async def aclose(self) -> None:
        self._closed = True
        await self._http.aclose()


def _closed_error(address: str) -> RuntimeError:
    return RuntimeError(f"the client for {address} is closed; create a new one")


def _reason(error: httpx2.TransportError) -> str:
    return str(error) or type(error).__name__


def _model_path(model: str, what: str = "") -> str:
    return f"/v2/models/{quote(model, safe='')}{what}"


def _check(item: Any, cancelled: bool) -> Columns | None:
    """An item of the queue: outputs, or None at the end; an error is raised."""
    if item is _END:
        if cancelled:
            raise RequestCancelledError("the request was cancelled by this client")
        return None
    if isinstance(item, Exception):
        raise item
    columns: Columns = item
    return columns


class AsyncHttpCall:
    """Async iterator over the outputs of a request."""

    def __init__(self, session: _Session, request: GenerationRequest, timeout: float | None) -> None:
        # The task references the queue but not this object, so dropping the object ends the task.
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        put = self._queue.put_nowait
        self._task = asyncio.create_task(session.pump(request, timeout, put))
        self._task.add_done_callback(lambda _: put(_END))
        self._cancelled = False

    def __aiter__(self) -> AsyncHttpCall:
        return self

    async def __anext__(self) -> Columns:
        columns = _check(await self._queue.get(), self._cancelled)
        if columns is None:
            raise StopAsyncIteration
        return columns

    def cancel(self) -> None:
        self._cancelled = True
        self._task.cancel()

    async def close(self) -> None:
        """Cancel and wait until the connection is closed."""
        self.cancel()
        await asyncio.wait([self._task])

    def __del__(self) -> None:
        if not self._task.done() and not self._task.get_loop().is_closed():
            self._task.cancel()


class AsyncHttpTransport:
    """For one event loop; create it in that loop."""

    def __init__(self, connection: Connection) -> None:
        self.address = connection.address
        self._session = _Session(connection)

    def open(self, request: GenerationRequest, timeout: float | None) -> AsyncHttpCall:
        """Send a request; `timeout` is the number of seconds it has left."""
        asyncio.get_running_loop()  # raises before the creation of a coroutine that would never be awaited
        self._session.check_open()
        return AsyncHttpCall(self._session, request, timeout)

    async def server_live(self) -> bool:
        return await self._session.is_ok("/v2/health/live")

    async def server_ready(self) -> bool:
        return await self._session.is_ok("/v2/health/ready")

    async def model_ready(self, model: str) -> bool:
        return await self._session.is_ok(_model_path(model, "/ready"))

    async def server_metadata(self) -> dict[str, Any]:
        return await self._session.json("/v2")

    async def model_metadata(self, model: str) -> dict[str, Any]:
        return await self._session.json(_model_path(model))

    async def repository_index(self) -> list[dict[str, Any]]:
        return await self._session.json_list("/v2/repository/index", {})

    async def control(self, model: str, question: Question, timeout: float) -> str:
        """The text that answers a question."""
        answer = await self._session.json(_model_path(model, "/generate"), http_control(question), timeout)
        return control_answer([{key: [value] for key, value in answer.items()}])

    async def close(self) -> None:
        await self._session.aclose()


def _run_and_close(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.run_until_complete(_cancel_others())
    loop.close()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _LoopThread:
    """An event loop in a daemon thread that ends with this object.

    Args:
        address: of the server, for errors.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._lock = threading.Lock()  # guards `_closed`; nothing is scheduled once it is set
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_and_close, args=(self._loop,), name="inflight-client", daemon=True)
        self._thread.start()

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._loop.stop)

    def start(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a coroutine in the loop.

        Raises:
            RuntimeError: the loop is closed.
        """
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise _closed_error(self.address)

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the loop and wait for it; raises RuntimeError if the loop is closed before its end."""
        try:
            return self.start(coroutine).result()
        except CancelledError:
            raise _closed_error(self.address) from None

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Run a last coroutine in the loop, and end all others.  Safe to repeat."""
        with self._lock:
            if self._closed:
                last.close()
                return
            future = asyncio.run_coroutine_threadsafe(last, self._loop)
            self._closed = True
        try:
            future.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


class HttpCall:
    """Iterator over the outputs of a request.  Any thread can call `cancel`."""

    def __init__(self, thread: _LoopThread, outputs: queue.SimpleQueue[Any], future: Future[None]) -> None:
        self._thread = thread  # keeps the loop running if the client is dropped
        # As in `AsyncHttpCall`, the task must not reference this object.
        self._queue = outputs
        self._future = future
        self._cancelled = False
        future.add_done_callback(lambda _: outputs.put(_END))

    def __iter__(self) -> HttpCall:
        return self

    def __next__(self) -> Columns:
        columns = _check(self._next(), self._cancelled)
        if columns is None:
            if self._future.cancelled() and not self._cancelled:
                raise _closed_error(self._thread.address)
            raise StopIteration
        return columns

    def _next(self) -> Any:
        """Ctrl-C that comes just before the wait does not end it: Python looks at signals before and after."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=_LOOK_SECONDS)

    def cancel(self) -> None:
        self._cancelled = True
        self._future.cancel()

    def close(self) -> None:
        self.cancel()

    def __del__(self) -> None:
        self._future.cancel()


class HttpTransport:
    """Blocking and thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self.address = connection.address
        self._thread = _LoopThread(connection.address)
        self._async = self._thread.run(self._make(connection))

    @staticmethod
    async def _make(connection: Connection) -> AsyncHttpTransport:
        return AsyncHttpTransport(connection)

    def open(self, request: GenerationRequest, timeout: float | None) -> HttpCall:
        """Send a request; `timeout` is the number of seconds it has left."""
        outputs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        future = self._thread.start(self._async._session.pump(request, timeout, outputs.put))
        return HttpCall(self._thread, outputs, future)

    def server_live(self) -> bool:
        return self._thread.run(self._async.server_live())

    def server_ready(self) -> bool:
        return self._thread.run(self._async.server_ready())

    def model_ready(self, model: str) -> bool:
        return self._thread.run(self._async.model_ready(model))

    def server_metadata(self) -> dict[str, Any]:
        return self._thread.run(self._async.server_metadata())

    def model_metadata(self, model: str) -> dict[str, Any]:
        return self._thread.run(self._async.model_metadata(model))

    def repository_index(self) -> list[dict[str, Any]]:
        return self._thread.run(self._async.repository_index())

    def control(self, model: str, question: Question, timeout: float) -> str:
        return self._thread.run(self._async.control(model, question, timeout))

    def close(self) -> None:
        self._thread.close(self._async.close())
