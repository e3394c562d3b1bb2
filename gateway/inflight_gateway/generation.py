"""The generation of one HTTP request: its concurrent upstream streams, and a client that can disconnect."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from inflight_client import GenerationResult, StreamChunk
from inflight_client.pooling import Pooled
from inflight_gateway.errors import APIError, api_error, request_error
from inflight_gateway.length_limit import LengthLimit
from inflight_gateway.sse import DONE, SSE, Framing, event
from inflight_gateway.upstream import AnyStream

if TYPE_CHECKING:
    from inflight_gateway.gateway import Gateway

__all__ = [
    "ClientGone",
    "EventEncoder",
    "EventStream",
    "Generation",
    "Piece",
    "complete",
    "failed_events",
    "stream_events",
]

Piece = tuple[int, StreamChunk]  # index of the prompt, and a chunk of its stream
Take = Callable[[Sequence[Piece]], Awaitable[None]]


class ClientGone(Exception):
    """The HTTP client disconnected: the answer is no longer needed."""


class EventEncoder(Protocol):
    """Converts chunks to the bytes of an event stream."""

    def begin(self) -> bytes:
        """Events before the first chunk; can be empty."""

    def chunk(self, prompt: int, chunk: StreamChunk) -> bytes:
        """Events for one chunk of a prompt's stream; can be empty."""

    def end(self) -> bytes:
        """Events after the last chunk, including the end of the stream (`[DONE]`)."""

    def failed(self, error: APIError) -> bytes:
        """Events for an error, including the end of the stream."""


class Generation:
    """The upstream requests of one HTTP request, one for each prompt; use it as an async context manager.

    All are cancelled at Triton when one fails, when the HTTP client disconnects, and when the context is left early.

    Args:
        gateway: limits, metrics and the upstream.
        http: the request, after its body was read.
        requests: arguments of `AsyncClient.stream`, for each prompt.

    Raises:
        APIError: too many open requests, or arguments that the client library refuses.
    """

    def __init__(self, gateway: Gateway, http: Request, requests: Sequence[Mapping[str, Any]]) -> None:
        self._gateway = gateway
        self._keep_alive_seconds = gateway.options.keep_alive_seconds
        self._loop = asyncio.get_running_loop()
        self._http = http
        self._requests = requests
        self._streams: list[AnyStream] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: list[Piece] = []  # the first chunks, until `deliver`
        self._take: Take | None = None
        self._begins = asyncio.Event()  # with `deliver`
        self._woken: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None  # one for many waits: one for each would cost more than a chunk
        self._wait_ends = 0.0
        self._running = 0
        self._error: APIError | None = None
        self._gone = False
        self._entered = False

    async def __aenter__(self) -> Generation:
        self._gateway.enter()
        self._entered = True
        try:
            for arguments in self._requests:
                self._streams.append(self._gateway.upstream.stream(**arguments))
        except Exception as error:
            await self.close()
            raise request_error(error) from error
        self._running = len(self._streams)
        self._tasks = [asyncio.create_task(self._read(i, stream)) for i, stream in enumerate(self._streams)]
        self._tasks.append(asyncio.create_task(self._watch_client()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel running requests.  Safe to repeat."""
        if not self._entered:
            return
        self._entered = False
        self._gateway.leave()
        self._gateway.beginning.discard(self)
        self.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cancel(self) -> None:
        """Cancel all requests at Triton."""
        for stream in self._streams:
            stream.cancel()

    @property
    def num_prompts(self) -> int:
        """Each has a stream and a task that calls `take`."""
        return len(self._requests)

    async def first(self) -> None:
        """Wait for the first chunk, at most `keep_alive_seconds`.

        Raises:
            APIError: the request failed before any chunk, so it can still be answered with a status.
            ClientGone: the client disconnected.
        """
        if not self._waiting and not self._is_over:
            await self._wait()
        if not self._waiting:
            self._raise()

    async def deliver(self, take: Take) -> None:
        """Call `take` with the chunks that have come, then with each further chunk when it comes, until the end.

        It is also called without any when a keep-alive comment is due.  While it waits for a slow client, the stream of
        the chunk is not read.

        Raises:
            APIError: a request failed; all its chunks before that were taken.
            ClientGone: the client disconnected.
            Exception: `take` raised it for the first chunks; for later ones it is an APIError.
        """
        try:
            while self._waiting and not self._gone:
                waiting, self._waiting = self._waiting, []
                await take(waiting)
            self._take = take
            self._begins.set()
            self._gateway.beginning.discard(self)
            while not self._is_over:
                await self._wait()
                if not self._is_over:
                    await take(())
            self._raise()
        finally:
            self._take = None

    async def results(self) -> list[GenerationResult]:
        """Wait for the complete answers, one per prompt.

        Raises:
            APIError, ClientGone: as `deliver`.
        """
        await self.deliver(_drop)
        return self.results_so_far()

    def results_so_far(self) -> list[GenerationResult]:
        """The output that has arrived."""
        return [stream.result() for stream in self._streams]

    def longest_prompt(self) -> int:
        """In tokens; 0 if no length is known yet."""
        return max((stream.num_input_tokens or 0 for stream in self._streams), default=0)

    def pooled(self) -> list[Pooled | None]:
        """The vectors that each request with `pooling` has got; None: none yet."""
        return [stream.pooled for stream in self._streams]

    def _raise(self) -> None:
        if self._gone:
            raise ClientGone
        if self._error is not None:
            raise self._error

    @property
    def _is_over(self) -> bool:
        return self._running == 0 or self._error is not None or self._gone

    async def _read(self, index: int, stream: AnyStream) -> None:
        """Read a stream, and let its chunks be taken.

        A step's chunks come in a burst, one of each stream.  First and last chunks of an output go out before the
        others, which let every task run that is ready now.
        """
        begun = False
        try:
            async for chunk in stream:
                if not self._begins.is_set():
                    self._waiting.append((index, chunk))
                    self._gateway.beginning.add(self)
                    self._wake()
                    await self._begins.wait()  # the answer begins before this stream is read further
                    begun = True
                    continue
                if begun and not _ends_output(chunk):
                    await asyncio.sleep(0)  # now all chunks of the burst are read
                    if self._gateway.beginning:
                        await asyncio.sleep(0)
                begun = True
                if self._take is None:  # the answer has ended before its streams
                    break
                self._wait_ends = self._loop.time() + self._keep_alive_seconds
                await self._take(((index, chunk),))
        except Exception as error:
            if self._error is None:
                self._error = api_error(error)
                self._gateway.log_failure(error, self._error)
        finally:
            self._gateway.metrics.resumed(stream.resumptions)
            self._running -= 1
            if self._is_over:
                self._wake()

    async def _watch_client(self) -> None:
        while (await self._http.receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._http.scope["client_gone"] = True  # for the metrics
        self.cancel()
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def _wait(self) -> None:
        """Wait until `_wake`, or until no chunk has come for `keep_alive_seconds`."""
        self._woken = self._loop.create_future()
        self._wait_ends = self._loop.time() + self._keep_alive_seconds
        if self._timer is None:
            self._timer = self._loop.call_at(self._wait_ends, self._time_is_up)
        try:
            await self._woken
        finally:
            self._woken = None

    def _time_is_up(self) -> None:
        """End the wait, or look again when it should end."""
        self._timer = None
        if self._loop.time() < self._wait_ends:
            self._timer = self._loop.call_at(self._wait_ends, self._time_is_up)
        else:
            self._wake()


def _ends_output(chunk: StreamChunk) -> bool:
    return any(one.finish_reason is not None for one in chunk.choices)


async def _drop(pieces: Sequence[Piece]) -> None:
    """Takes chunks of an answer that is needed as a whole."""


@functools.cache
def _stream_headers(media_type: str) -> tuple[tuple[bytes, bytes], ...]:
    response = Response(media_type=media_type)
    del response.headers["content-length"]
    response.headers["cache-control"] = "no-cache"
    response.headers["x-accel-buffering"] = "no"  # nginx would buffer events
    return tuple(response.raw_headers)


class EventStream(Response):
    """The response of a streaming request.  It closes the generation.

    Args:
        gateway: counts the chunks that are sent.
        generation: entered, after `first`.
        encoder: creates the events.
        framing: of the stream.
    """

    def __init__(self, gateway: Gateway, generation: Generation, encoder: EventEncoder, framing: Framing = SSE) -> None:
        # What `Response.__init__` sets; it would encode the same headers for each stream.
        self.status_code, self.background, self.body = 200, None, b""
        self.raw_headers = list(_stream_headers(framing.media_type))
        self._gateway = gateway
        self._generation = generation
        self._encoder = encoder
        self._keep_alive = framing.keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["has_output"] = True  # the generation's first chunk
        if self._generation.num_prompts > 1:
            send = _in_order(send)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await self._send_events(send)
            except asyncio.CancelledError:  # the server cancels requests after its exit timeout
                await self._send_failure(send, APIError(503, "the gateway is shutting down", code="shutting_down"))
        except ClientGone:
            pass
        finally:
            await self._generation.close()

    async def _send_events(self, send: Send) -> None:
        encoder, sent = self._encoder, self._gateway.metrics.sent
        body = encoder.begin()

        async def take(pieces: Sequence[Piece]) -> None:
            nonlocal body
            if pieces:
                sent(len(pieces))
                body += b"".join([encoder.chunk(prompt, chunk) for prompt, chunk in pieces])
            else:
                body += self._keep_alive
            if body:
                ready, body = body, b""
                await send({"type": "http.response.body", "body": ready, "more_body": True})

        try:
            await self._generation.deliver(take)
            body += encoder.end()
        except ClientGone:
            raise
        except Exception as error:
            shown = api_error(error)
            self._gateway.log_failure(error, shown)
            await self._send_failure(send, shown, body)
        else:
            await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send_failure(self, send: Send, error: APIError, before: bytes = b"") -> None:
        self._gateway.metrics.broke()
        body = before + self._encoder.failed(error)
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _in_order(send: Send) -> Send:
    """`send` for several tasks: messages leave in the order of the calls.

    For a slow client the server lets each call wait, and a later call can come first: an end before another's chunk.
    """
    lock = asyncio.Lock()

    async def send_next(message: Message) -> None:
        async with lock:
            await send(message)

    return send_next


async def stream_events(
    gateway: Gateway,
    http: Request,
    requests: Sequence[Mapping[str, Any]],
    limit: LengthLimit,
    encoder: EventEncoder,
    framing: Framing = SSE,
) -> Response:
    """Send the requests; returns the response that streams their events.

    Its headers say whether the context is shorter than `limit`.

    Raises:
        APIError, ClientGone: before any event, see `Generation.first`.
    """
    generation = await Generation(gateway, http, requests).__aenter__()
    try:
        await generation.first()
        limit.check(http.scope, generation.longest_prompt())
    except BaseException:
        await generation.close()
        raise
    return EventStream(gateway, generation, encoder, framing)


async def complete(
    gateway: Gateway, http: Request, requests: Sequence[Mapping[str, Any]], limit: LengthLimit
) -> list[GenerationResult]:
    """Send the requests and wait for their complete answers, one per request.

    The response's headers will say whether the context is shorter than `limit`.

    Raises:
        APIError, ClientGone: see `Generation.deliver`.
    """
    async with Generation(gateway, http, requests) as generation:
        results = await generation.results()
    limit.check(http.scope, generation.longest_prompt())
    return results


def failed_events(error: APIError) -> bytes:
    """The end of a failed request's stream: an event with OpenAI's error object, then `[DONE]`."""
    return event(error.to_dict()) + DONE
