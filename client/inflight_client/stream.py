"""The caller's view of a request: an iterator over chunks that retries, measures and cancels."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, Protocol

from inflight_client.continuation import Continuation
from inflight_client.endpoints import Endpoints
from inflight_client.errors import InflightError, RequestCancelledError, ServerUnreachableError, UnavailableError
from inflight_client.pooling import Pooled, pooled_of
from inflight_client.request import GenerationRequest
from inflight_client.results import GenerationResult, ResultBuilder, StreamChunk
from inflight_client.retry import RetryPolicy
from inflight_client.wire import Columns, chunk_of

__all__ = ["AsyncStream", "Servers", "Stream"]


class _Call(Protocol):
    def __next__(self) -> Columns: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


class _AsyncCall(Protocol):
    async def __anext__(self) -> Columns: ...
    def cancel(self) -> None: ...
    async def close(self) -> None: ...


class Servers(Protocol):
    """Transports by index, and the choice of the next one."""

    endpoints: Endpoints

    def open(self, index: int, request: GenerationRequest, timeout: float | None) -> Any:
        """Send a request; `timeout` is the number of seconds it has left."""

    def address(self, index: int) -> str: ...

    def responds(self, index: int, model: str) -> Any:
        """Whether the server's model is ready and answers; an `AsyncStream` awaits it.  Raises nothing."""

    def watch(self, stream: Stream) -> None:
        """Call `stream.check_stall` periodically while it lives."""


class _Exchange:
    """The common part of the blocking and the asyncio stream: attempts, times, and the result so far.

    Attributes:
        request: as it was sent first.
        pooled: the response to a request with `pooling`, once it has arrived.
        resumptions: how often the stream was interrupted after its first output, and continued: once, however many
            attempts that takes.
    """

    def __init__(self, request: GenerationRequest, policy: RetryPolicy, servers: Any) -> None:
        self._policy = policy
        self._servers: Servers = servers
        resumes = len(servers.endpoints) > 1 if policy.resume is None else policy.resume
        self._continuation = Continuation(request, resumes)
        self.request = self._continuation.request
        self._n = request.n  # computed from the sampling parameters
        sequences = self._n if request.pooling is None else 1  # vectors have no text
        self._builder = ResultBuilder(sequences, None if request.input_ids is None else len(request.input_ids))
        self._attempts = 0
        self._refusals = 0
        self.resumptions = 0
        self.pooled: Pooled | None = None
        self._index = 0
        self._in_flight: list[int] = []  # the server that counts this attempt; the thread that pops it reports the end
        self._answered = False
        self._failing_since: float | None = None  # `_elapsed`, at the first failure after a response
        self._ended = False
        self._cancelled = False
        self._waiting_since: float | None = None  # `time.monotonic()`, while a response is awaited
        self._stalled_call: Any = None
        self._total: float | None = None
        self._started = time.perf_counter()
        self._call: Any = None
        self._open()

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_input_tokens(self) -> int | None:
        """Tokens of the prompt; None until a response has told."""
        return self._builder.num_input_tokens

    def rest(self) -> GenerationRequest:
        """The request for the output that has not arrived, in the time that is left; `send` of another client takes it.

        If no token has arrived, or the stream cannot be continued, its `resume_token_ids` are the ones of `request`.
        """
        return self._continuation.rest().changed(timeout=self._left())

    def result(self) -> GenerationResult:
        """The output so far; the complete answer once the stream has ended."""
        total = self._elapsed() if self._total is None else self._total
        return self._builder.build(self.request_id, self.request.model, self._attempts, total)

    def cancel(self) -> None:
        """Cancel the request on the server; further reading raises `RequestCancelledError`.

        Safe to call repeatedly, from any thread (`AsyncStream`: from its event loop), and after the end.
        """
        if not self._ended:
            self._cancelled = True
            self._call.cancel()
            self._leave()

    @property
    def _stall_timeout(self) -> float | None:
        return self._policy.stall_timeout if self._continuation.possible else None

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started

    def _left(self) -> float | None:
        """Seconds until the deadline; None: there is none."""
        timeout = self.request.timeout
        return None if timeout is None else max(timeout - self._elapsed(), 1e-6)

    def _open(self) -> None:
        self._attempts += 1
        self._index, self._answered = self._servers.endpoints.begin(self.request), False
        self._in_flight.append(self._index)
        try:
            self._call = self._servers.open(self._index, self._continuation.rest(), self._left())
        except BaseException:
            self._leave()
            raise
        if self._cancelled:  # by another thread, while the call was opening
            self._call.cancel()

    def _leave(self) -> None:
        """The attempt is over.  Safe to repeat, from any thread."""
        with contextlib.suppress(IndexError):
            self._servers.endpoints.end(self._in_flight.pop(), self.request)

    def _end(self) -> None:
        self._leave()
        if not self._ended:
            self._ended, self._total = True, self._elapsed()

    def _take(self, columns: Columns) -> StreamChunk | None:
        self.resumptions += self._failing_since is not None and self._continuation.received
        self._failing_since = None
        if not self._answered:
            self._answered = True
            self._servers.endpoints.answered(self._index)
        if self.request.pooling is not None and "pooled" in columns:
            self.pooled = pooled_of(columns, self._n)
            self._continuation.take_whole()
            return None
        chunk = chunk_of(columns, self._n)
        if chunk is not None:
            self._continuation.take(columns, chunk)
            chunk.elapsed = self._elapsed()
            self._builder.add(chunk)
        return chunk

    def _check_end(self) -> None:
        """The call has ended: raise an error if the output is not complete."""
        if self._continuation.possible and not self._continuation.complete and not self._cancelled:
            raise ServerUnreachableError(f"{self._servers.address(self._index)} ended the stream before its output")
        self._end()

    def _stalled(self, call: Any) -> None:
        """A response is overdue: cancel the call, so that the reader gets an error."""
        self._stalled_call = call
        call.cancel()

    def _delay_after(self, error: InflightError) -> float | None:
        """Seconds until the next attempt; None if the output is complete.  Raises the error if no attempt is left."""
        if self._stalled_call is self._call and isinstance(error, RequestCancelledError):
            address, seconds = self._servers.address(self._index), self._policy.stall_timeout
            error = ServerUnreachableError(f"{address} has sent nothing for {seconds:g} s")
        if self._cancelled and not isinstance(error, RequestCancelledError):
            error = self._cancellation()
        if isinstance(error, UnavailableError) and not self._cancelled:
            if self._continuation.complete:
                self._end()
                return None
            self._servers.endpoints.failed(self._index, error.retry_after)
            self._refusals += not isinstance(error, ServerUnreachableError)
            delay = self._next_delay()
            if delay is not None:
                self._leave()
                return delay
        self._end()
        error.request_id = self.request_id
        error.partial = self.result() if self._continuation.received else None
        raise error

    def _next_delay(self) -> float | None:
        """Seconds until the next attempt; None if there is none."""
        if self._continuation.received and not self._continuation.possible:
            return None
        has_output = self._continuation.received or self.request.resume_token_ids is not None  # here, or before it
        if not has_output and self._policy.max_refusals is not None and self._refusals >= self._policy.max_refusals:
            return None
        elapsed, asked = self._elapsed(), self._servers.endpoints.asked_wait()
        if self._failing_since is None:
            self._failing_since = elapsed
        outage = elapsed - self._failing_since
        delay = self._policy.delay(self._attempts, elapsed, has_output, outage)
        longest = self._policy.max_retry_after
        if has_output and self._policy.outage_timeout is not None:  # a hint must not end an answer that has begun
            longest = max(longest, self._policy.outage_timeout - outage)
        if delay is None or asked > longest:
            return None
        delay = max(delay, asked)
        limits = [limit for limit in (self.request.timeout, self._policy.total_timeout) if limit is not None]
        return delay if all(elapsed + delay < limit for limit in limits) else None

    def _check_cancelled(self) -> None:
        """Responses that came before the cancellation can still be in the call."""
        if self._cancelled:
            raise self._cancellation()

    @staticmethod
    def _cancellation() -> RequestCancelledError:
        return RequestCancelledError("the request was cancelled by this client")


class Stream(_Exchange, Iterator[StreamChunk]):
    """Iterator over the chunks of a request that was sent already.  Use `with` or `close()` to leave it early.

    Iterating raises an `InflightError` if the request fails.  Other threads can call `cancel()`;
    everything else belongs to one thread.
    """

    def __init__(self, request: GenerationRequest, policy: RetryPolicy, servers: Servers) -> None:
        self._wake = threading.Event()
        super().__init__(request, policy, servers)
        if self._stall_timeout is not None:
            servers.watch(self)

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
            try:
                self._waiting_since = time.monotonic()
                self._check_cancelled()
                return self._take(next(call))
            except StopIteration:
                self._check_end()
            finally:
                self._waiting_since = None
        except InflightError as error:
            delay = self._delay_after(error)
            if delay is None:
                return None
            if self._wake.wait(delay):
                self._delay_after(self._cancellation())
            self._open()
        except BaseException:  # such as Ctrl-C: the server must not keep generating
            self.close()
            raise
        return None

    def check_stall(self, now: float, responds: dict[int, bool]) -> None:
        """Check whether a response is overdue; called by another thread.  `responds` caches what servers answered."""
        since, call, index, limit = self._waiting_since, self._call, self._index, self._stall_timeout
        if self._ended or self._cancelled or since is None or limit is None or now - since < limit:
            return
        if not self._continuation.received:
            if index not in responds:
                responds[index] = self._servers.responds(index, self.request.model)
            if responds[index]:  # the request can be waiting in a queue
                self._waiting_since = None if self._waiting_since is None else time.monotonic()
                return
        self._stalled(call)

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


def _look_again(reference: weakref.ref[AsyncStream]) -> None:
    """A timer's callback; it holds only a weak reference to the stream."""
    stream = reference()
    if stream is not None:
        stream.check_stall(time.monotonic())


class AsyncStream(_Exchange, AsyncIterator[StreamChunk]):
    """As `Stream`, for one event loop.  Cancelling the task that reads cancels the request."""

    def __init__(self, request: GenerationRequest, policy: RetryPolicy, servers: Servers) -> None:
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = (
            None  # one per stream: a timer per response would cost more than the response
        )
        self._check: asyncio.Task[None] | None = None
        super().__init__(request, policy, servers)

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
            self._waiting_since = time.monotonic()
            if self._timer is None:
                self._arm(self._stall_timeout)
            try:
                self._check_cancelled()
                return self._take(await call.__anext__())
            except StopAsyncIteration:
                self._check_end()
            finally:
                self._waiting_since = None
        except InflightError as error:
            delay = self._delay_after(error)
            if delay is None:
                return None
            if await self._woken_within(delay):
                self._delay_after(self._cancellation())
            self._open()
        except BaseException:
            self._end()
            self._call.cancel()
            raise
        return None

    def _arm(self, seconds: float | None) -> None:
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, _look_again, weakref.ref(self))

    def check_stall(self, now: float) -> None:
        """Check whether a response is overdue, and set the timer for the next check."""
        since, limit = self._waiting_since, self._stall_timeout
        if self._ended or self._cancelled or limit is None:
            return
        left = limit if since is None else since + limit - now
        if left > 0:
            self._arm(left)
        else:
            self._check = asyncio.get_running_loop().create_task(self._overdue(self._call, since))

    async def _overdue(self, call: _AsyncCall, since: float | None) -> None:
        may_wait = False
        if not self._continuation.received:  # the request can be waiting in a queue
            may_wait = await self._servers.responds(self._index, self.request.model)
        if not self._ended and self._call is call and self._waiting_since == since:
            self._waiting_since = time.monotonic() if may_wait else None
            if not may_wait:
                self._stalled(call)
        self.check_stall(time.monotonic())

    def _end(self) -> None:
        super()._end()
        if self._timer is not None:
            self._timer.cancel()

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
