"""A request as its caller sees it: an iterator over chunks that retries, measures and cancels."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, Protocol

from inflight_client.errors import InflightError, RequestCancelledError, UnavailableError
from inflight_client.request import GenerationRequest
from inflight_client.results import GenerationResult, ResultBuilder, StreamChunk
from inflight_client.retry import RetryPolicy
from inflight_client.wire import Columns, chunk_of

__all__ = ["AsyncStream", "Stream"]


class _Call(Protocol):
    def __next__(self) -> Columns: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


class _AsyncCall(Protocol):
    async def __anext__(self) -> Columns: ...
    def cancel(self) -> None: ...
    async def close(self) -> None: ...


class _Exchange:
    """What the blocking and the asyncio stream share: attempts, times, and the result so far.

    `open_call(request, timeout)` sends the request; `timeout` is the number of seconds left.
    """

    def __init__(
        self,
        request: GenerationRequest,
        policy: RetryPolicy,
        open_call: Callable[[GenerationRequest, float | None], Any],
    ) -> None:
        self.request = request
        self._policy = policy
        self._open_call = open_call
        self._builder = ResultBuilder(request.n, None if request.input_ids is None else len(request.input_ids))
        self._attempts = 0
        self._received = False
        self._ended = False
        self._cancelled = False
        self._total: float | None = None
        self._started = time.perf_counter()
        self._call: Any = None
        self._open()

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def result(self) -> GenerationResult:
        """What has arrived so far; the complete answer once the stream has ended."""
        total = self._elapsed() if self._total is None else self._total
        return self._builder.build(self.request_id, self.request.model, self._attempts, total)

    def cancel(self) -> None:
        """Cancel the request on the server; reading on raises `RequestCancelledError`.

        Safe to call repeatedly, from any thread (`AsyncStream`: from its event loop), and after the end.
        """
        if not self._ended:
            self._cancelled = True
            self._call.cancel()

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started

    def _open(self) -> None:
        self._attempts += 1
        timeout = self.request.timeout
        self._call = self._open_call(self.request, None if timeout is None else max(timeout - self._elapsed(), 1e-6))
        if self._cancelled:  # while the call was opening
            self._call.cancel()

    def _end(self) -> None:
        if not self._ended:
            self._ended, self._total = True, self._elapsed()

    def _take(self, columns: Columns) -> StreamChunk | None:
        self._received = True
        chunk = chunk_of(columns, self.request.n)
        if chunk is not None:
            chunk.elapsed = self._elapsed()
            self._builder.add(chunk)
        return chunk

    def _delay_after(self, error: InflightError) -> float:
        """Seconds until the next attempt; raises the error for the caller if there is none."""
        if self._cancelled and not isinstance(error, RequestCancelledError):
            error = self._cancellation()
        if isinstance(error, UnavailableError) and not self._received and not self._cancelled:
            delay, timeout = self._policy.delay(self._attempts, self._elapsed()), self.request.timeout
            if delay is not None and (timeout is None or self._elapsed() + delay < timeout):
                return delay
        self._end()
        error.request_id = self.request_id
        error.partial = self.result() if self._received else None
        raise error

    @staticmethod
    def _cancellation() -> RequestCancelledError:
        return RequestCancelledError("the request was cancelled by this client")


class Stream(_Exchange, Iterator[StreamChunk]):
    """Iterator over the chunks of a request that was sent already.  Use `with` or `close()` to leave it early.

    Iterating raises an `InflightError` if the request fails.  `cancel()` may be called from another
    thread; everything else belongs to one thread.
    """

    def __init__(
        self,
        request: GenerationRequest,
        policy: RetryPolicy,
        open_call: Callable[[GenerationRequest, float | None], _Call],
    ) -> None:
        self._wake = threading.Event()
        super().__init__(request, policy, open_call)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> StreamChunk:
        while not self._ended:
            chunk = self._read()
            if chunk is not None:
                return chunk
        raise StopIteration

    def _read(self) -> StreamChunk | None:
        """The next response; None if it has no outputs, at the end, and after a failed attempt."""
        call: _Call = self._call
        try:
            return self._take(next(call))
        except StopIteration:
            self._end()
        except InflightError as error:
            if self._wake.wait(self._delay_after(error)):
                self._delay_after(self._cancellation())
            self._open()
        except BaseException:  # such as Ctrl-C: the server must not keep generating
            self.close()
            raise
        return None

    def cancel(self) -> None:
        super().cancel()
        self._wake.set()

    def close(self) -> None:
        """End the iteration, and cancel the request on the server if it is still running."""
        if not self._ended:
            self._end()
            self._call.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncStream(_Exchange, AsyncIterator[StreamChunk]):
    """As `Stream`, for one event loop.  Cancelling the task that reads cancels the request."""

    def __init__(
        self,
        request: GenerationRequest,
        policy: RetryPolicy,
        open_call: Callable[[GenerationRequest, float | None], _AsyncCall],
    ) -> None:
        self._wake = asyncio.Event()
        super().__init__(request, policy, open_call)

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> StreamChunk:
        while not self._ended:
            chunk = await self._read()
            if chunk is not None:
                return chunk
        raise StopAsyncIteration

    async def _read(self) -> StreamChunk | None:
        call: _AsyncCall = self._call
        try:
            return self._take(await call.__anext__())
        except StopAsyncIteration:
            self._end()
        except InflightError as error:
            if await self._woken_within(self._delay_after(error)):
                self._delay_after(self._cancellation())
            self._open()
        except BaseException:
            self._end()
            self._call.cancel()
            raise
        return None

    async def _woken_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._wake.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    def cancel(self) -> None:
        super().cancel()
        self._wake.set()

    async def close(self) -> None:
        """As `Stream.close`."""
        if not self._ended:
            self._end()
            await self._call.close()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
