"""Connections of clients: how many, and how long one may take to send the head of a request, or to read its answer.

uvicorn limits none of these.  Without limits, clients that send nothing use up the process's file descriptors, and
clients that read nothing the requests that may be open.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
from asyncio.events import TimerHandle
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from inflight_gateway.errors import APIError
from inflight_gateway.response_headers import new_request_id

__all__ = ["BODY_ARRIVED", "IDLE_SECONDS", "STATE", "ClientConnection", "Connections", "HeadWithBody"]

_log = logging.getLogger("inflight_gateway")

STATE = "connections"  # key of the `Connections` in the lifespan's state
BODY_ARRIVED = "inflight_body_arrived"  # key of a request's scope, once all of its body has come
IDLE_SECONDS = 75  # longer than clients keep idle connections: closing one under a request is an error
_BYTES_ACKED = slice(120, 128)  # of Linux's `struct tcp_info`: tcpi_bytes_acked
_MAX_HEAD_BYTES = 64 * 1024  # of a request's head, and of what else is around its body
_LINGER_SECONDS = 5.0  # for a client to read a refusal, while what it still sends is dropped
_LINGER_BYTES = 1 << 20  # of that
_SPARE_DESCRIPTORS = 64  # for connections to Triton, logs and metrics
_FULL = APIError(503, "this gateway has too many connections; try again later", code="connections_full", retry_after=1)


_HEAD_TOO_LARGE = APIError(
    431, f"the head of the request has more than {_MAX_HEAD_BYTES} bytes, the most that are allowed; send fewer headers"
)


class Connections:
    """The connections of a process.

    Args:
        limit: maximum number; lowered to what the process can open.
        header_timeout: seconds for the head of a request to arrive.
        send_timeout: seconds in which a client must read some of what waits for it.
    """

    def __init__(self, limit: int, header_timeout: float, send_timeout: float = 60.0) -> None:
        self.header_timeout = header_timeout
        self.send_timeout = send_timeout
        self._limit = min(limit, max(1, _descriptors() - _SPARE_DESCRIPTORS))
        if self._limit < limit:
            _log.warning("max_connections=%d: lowered to %d, what `ulimit -n` leaves", limit, self._limit)
        self._open: set[ClientConnection] = set()
        self._waiting: dict[ClientConnection, None] = {}  # without a request, the longest first

    def opened(self, connection: ClientConnection) -> bool:
        """A client has connected; returns whether there is room for it.

        A connection without a request makes room, the one that has waited longest.
        """
        if len(self._open) >= self._limit:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                return False
            self.closed(oldest)
            oldest.end()
        self._open.add(connection)
        self._waiting[connection] = None
        return True

    def works(self, connection: ClientConnection) -> None:
        """The head of a request is complete."""
        self._waiting.pop(connection, None)

    def waits(self, connection: ClientConnection) -> None:
        """A request has ended."""
        if connection in self._open:
            self._waiting[connection] = None

    def closed(self, connection: ClientConnection) -> None:
        """The connection is closed, or will be.  Safe to repeat."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)


def _descriptors() -> int:
    """The number of files that the process can open, raised as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return 2**31 if hard == resource.RLIM_INFINITY else hard


class HeadWithBody:
    """The transport of one response, whose head is written together with what follows it at once.

    A write wakes the client: two of them cost both sides twice as much, and delay the first token.

    Args:
        transport: of the connection; everything but `write` is its own.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None
        self.write = self._begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _begin(self, data: bytes) -> None:
        self._head, self.write = data, self._join
        self._loop.call_soon(self._flush)

    def _join(self, data: bytes) -> None:
        head, self._head, self.write = self._head or b"", None, self._transport.write
        self._transport.write(head + data)

    def _flush(self) -> None:
        """Nothing has followed the head at once."""
        if self._head is not None:
            self._join(b"")


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Let the body of a response end with its connection: clients of HTTP/1.0 know no chunks.

    uvicorn compares a body that has none with a length that is known beforehand, so each part is counted in before it
    is sent.
    """
    send, cycle.chunked_encoding = cycle.send, False

    async def send_counted(message: Any) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length += len(message.get("body", b""))
        await send(message)

    cycle.send = send_counted  # type: ignore[method-assign]


class ClientConnection(HttpToolsProtocol):
    """A connection.  While it has no request, a timer runs: for the head of one, or until its first byte."""

    _timer: TimerHandle | None = None
    _send_timer: TimerHandle | None = None  # while more waits for the client than may be added to
    _received = 0
    _answers: RequestResponseCycle | None = None  # the request that is answered; `cycle` is the one that came last
    _has_request = False
    _in_body = False  # of the request that came last
    _is_idle = False  # nothing has arrived since the last request
    _head_bytes = 0  # of the last request, with trailers
    _bytes_in_parser = 0  # that came since it has told of a part of a request
    _bytes_to_drop: int | None = None  # after a refusal; None: there was none

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._registry = cast(Connections, self.app_state[STATE])
        if not self._registry.opened(self):
            self._write(_FULL)
            self._close()  # at once: there is no room to wait for its client
            return
        self._arm(self._registry.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._disarm_send()
        self._registry.closed(self)
        if self._answers is not None:  # uvicorn tells `cycle` only: of several requests on their way, the last
            self._answers.disconnected = True
            self._answers.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_client()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._has_request and not self.transport.is_closing():  # else nothing else looks at what still waits
            self._disarm_send()

    def data_received(self, data: bytes) -> None:
        if self._bytes_to_drop is not None:
            self._drop(data)
            return
        was_idle, self._is_idle = self._is_idle, False
        self._bytes_in_parser += len(data)
        super().data_received(data)
        if self._bytes_in_parser > _MAX_HEAD_BYTES and not self._is_refused:
            self._refuse(_HEAD_TOO_LARGE)
        if was_idle and not self._has_request and not self._is_idle and not self._is_refused:  # part of a head
            self._arm(self._registry.header_timeout)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._bytes_in_parser = 0
        super().on_body(body)

    def _count_head(self, size: int) -> None:
        self._bytes_in_parser = 0
        self._head_bytes += size
        if self._head_bytes > _MAX_HEAD_BYTES:
            raise ValueError("too large")  # the parser ends, and `send_400_response` answers

    def on_headers_complete(self) -> None:
        self._has_request = self._in_body = True
        self._disarm()
        if not self.flow.write_paused:
            self._disarm_send()
        self._registry.works(self)
        waiting = len(self.pipeline)
        super().on_headers_complete()
        if len(self.pipeline) == waiting:  # it does not wait for an earlier one
            self._answers = self.cycle
        self.cycle.transport = cast(asyncio.Transport, HeadWithBody(self.transport, self.loop))
        if self.cycle.scope["http_version"] == "1.0":
            _send_without_chunks(self.cycle)

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()
        cast(dict[str, Any], self.scope)[BODY_ARRIVED] = True
        if not self._has_request:  # the rest of a body whose request was answered before it came
            self._wait()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answers = self.pipeline[-1][0]
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:  # no further request has arrived already
            self._has_request = False
            self._registry.waits(self)
            self._wait()
        elif self.transport.is_closing():
            self._watch_client()

    def shutdown(self) -> None:
        """The process ends; uvicorn waits for the requests, but one that was refused in its body has no end."""
        if self._bytes_to_drop is None:
            super().shutdown()
        else:
            self._close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or too large."""
        self._refuse(_HEAD_TOO_LARGE if self._head_bytes > _MAX_HEAD_BYTES else APIError(400, msg))

    def end(self) -> None:
        """Close the connection; a client that does not read what was sent loses it."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _refuse(self, error: APIError) -> None:
        """End the connection, with this error unless it would be read as the answer to an earlier request."""
        if self._is_next():
            self._write(error)
            self._linger()
        else:
            self._close()

    @property
    def _is_refused(self) -> bool:
        return self._bytes_to_drop is not None or self.transport.is_closing()

    def _close(self) -> None:
        """Close the connection when its client has read what was sent, such as a whole answer before a refusal."""
        self.transport.close()
        self._watch_client()

    def _linger(self) -> None:
        """Half-close, then drop up to `_LINGER_BYTES` for up to `_LINGER_SECONDS`.

        A close resets the connection if what has come was not read, and the client can lose the answer (RFC 9112,
        section 9.6).
        """
        self._bytes_to_drop = _LINGER_BYTES
        if self.cycle is not None and not self.cycle.response_complete:  # the refused body is its own
            self.cycle.disconnected, self.cycle.waiting_for_100_continue = True, False
            self.cycle.message_event.set()
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()
        self.flow.resume_reading()
        self._registry.waits(self)
        self._arm(_LINGER_SECONDS)

    def _drop(self, data: bytes) -> None:
        self._bytes_to_drop = cast(int, self._bytes_to_drop) - len(data)
        if self._bytes_to_drop < 0 and not self.transport.is_closing():
            self._close()

    def _is_next(self) -> bool:
        """Whether the client waits for an answer to what arrives now, and has nothing of it."""
        if self.cycle is None or self.cycle.response_complete:
            return not self._in_body
        return self._in_body and self._answers is self.cycle and not self.cycle.response_started

    def _write(self, error: APIError) -> None:
        body = error.to_json()
        headers = {
            **error.headers,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": new_request_id(),
            "connection": "close",
        }
        status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"
        lines = [status, *(f"{name.lower()}: {value}" for name, value in headers.items()), "", ""]
        self.transport.write("\r\n".join(lines).encode("ascii") + body)

    def _watch_client(self) -> None:
        """Look again after `send_timeout`: a client that has read nothing by then would keep its request for ever."""
        self._disarm_send()
        if self.transport.get_write_buffer_size():
            self._received = self._received_now()
            self._send_timer = self.loop.call_later(self._registry.send_timeout, self._look_at_client)

    def _look_at_client(self) -> None:
        if self._received_now() > self._received or not self.transport.get_write_buffer_size():
            self._watch_client()
        else:
            self.transport.abort()

    def _received_now(self) -> int:
        """Grows as the client's machine takes bytes: the number acknowledged or, if unknown, minus those waiting.

        The transport's buffer shrinks late and in large steps, and with TLS not before much has been read.
        """
        if sys.platform == "linux":
            try:
                info = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
            except OSError:  # a Unix socket, or one that is closed
                info = b""
            if acknowledged := int.from_bytes(info[_BYTES_ACKED], sys.byteorder):
                return acknowledged
        return -self.transport.get_write_buffer_size()

    def _disarm_send(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _wait(self) -> None:
        self._is_idle = True
        self._disarm()
        self._timer = self.loop.call_later(IDLE_SECONDS, self._end_idle)

    def _end_idle(self) -> None:
        """A client that still reads its last answer is not idle."""
        if not self.transport.get_write_buffer_size():
            self.end()
            return
        self._wait()
        if self._send_timer is None:
            self._watch_client()

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._close)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
