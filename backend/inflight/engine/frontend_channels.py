"""The frontends of one engine: receives their messages, and sends each its part of every step.  Pure Python, no torch.

    reader threads ──(frontend, message)──▶ inbox ──▶ step loop ──▶ Frontends.send_step ──▶ channels

A request's id names its frontend (`messages.REQUESTS_PER_FRONTEND`), so nothing is looked up per token.  The
first frontend *leads*: it publishes the metrics of the engine as a whole.  When it leaves, the next one leads.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Collection, Iterator
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Protocol, Union

import msgspec

from inflight.engine.deltas import RequestFailed, SequenceDelta, StepStats, TokenColumns
from inflight.engine.messages import (
    REQUESTS_PER_FRONTEND,
    Answer,
    EngineReady,
    Shutdown,
    StepMessage,
    ToEngine,
    ToFrontend,
    decode_to_engine,
    encode,
)

__all__ = [
    "Channel",
    "Frontend",
    "Frontends",
    "Inbox",
    "Joined",
    "Left",
    "QueuedChannel",
    "accept_into",
    "read_into",
    "split_step",
]

# Unread bytes at which a frontend that does not read is cut off.
_MAX_UNREAD_BYTES = 64 * 2**20
_MAX_ENDED = 1000  # ended requests whose pipes are remembered, beside as many as have not ended
_NOW = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Channel(Protocol):
    """One frontend's end of a pipe that carries `engine/messages.py`."""

    def send_bytes(self, frame: bytes) -> None: ...
    def close(self) -> None: ...


def _number(request_id: int) -> int:
    """Number of the frontend that a request came from."""
    return request_id // REQUESTS_PER_FRONTEND


class Frontend:
    """One frontend of the engine.

    Attributes:
        number: as in its request ids.
    """

    def __init__(self, number: int, channel: Channel) -> None:
        self.number = number
        self._channel = channel

    def send(self, message: ToFrontend) -> None:
        self._channel.send_bytes(encode(message))

    def close(self) -> None:
        self._channel.close()


class Joined:
    """In the inbox: a new frontend."""


class Left:
    """In the inbox: a frontend whose pipe has closed."""


# Sender and message; or the receiver of an answer that has come late.
Inbox = SimpleQueue[tuple[Frontend, Union[ToEngine, Joined, Left, Answer]]]


def read_into(inbox: Inbox, owner: Frontend, connection: Connection) -> None:
    """Body of a thread: the messages of an engine's only frontend; the engine ends with it."""
    inbox.put((owner, Joined()))
    _read(inbox, owner, connection)
    inbox.put((owner, Shutdown()))


def accept_into(inbox: Inbox, owner: Frontend, connection: Connection) -> None:
    """Body of a thread: frontends that the owner sends, each with a thread that reads its messages.

    A frontend arrives as its number in four bytes, with its pipe's descriptor (SCM_RIGHTS).
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as pipe:
        while True:
            number, descriptors, _, _ = socket.recv_fds(pipe, 4, 1, socket.MSG_CMSG_CLOEXEC)
            if not number:
                break
            end = socket.socket(fileno=descriptors[0])
            frontend = Frontend(int.from_bytes(number, "big"), QueuedChannel(end))
            reads = Connection(os.dup(end.fileno()))
            threading.Thread(target=_serve_one, args=(inbox, frontend, reads), name="reader", daemon=True).start()
    inbox.put((owner, Shutdown()))


def _serve_one(inbox: Inbox, frontend: Frontend, connection: Connection) -> None:
    inbox.put((frontend, Joined()))
    _read(inbox, frontend, connection)
    inbox.put((frontend, Left()))


def _read(inbox: Inbox, frontend: Frontend, connection: Connection) -> None:
    """Messages arrive while a step runs.  An undecodable frame ends the frontend, as a closed pipe does."""
    with contextlib.suppress(EOFError, OSError, msgspec.DecodeError):
        while True:
            inbox.put((frontend, decode_to_engine(connection.recv_bytes())))


class Frontends:
    """The connected frontends, in the order in which they connected.

    Args:
        live_ids: a live view of the ids of the requests that have not ended.
        ready: the first message to each.
    """

    def __init__(self, live_ids: Collection[int], ready: EngineReady) -> None:
        self._live_ids = live_ids
        self._ready = ready
        self._connected: list[Frontend] = []
        self._came_over: dict[int, Frontend] = {}  # by request id; ended ones go in time
        self._columns = _ColumnSplitter()
        self._last_stats: StepStats | None = None

    def join(self, frontend: Frontend) -> None:
        """Serve a frontend from now on."""
        leads = not self._connected
        frontend.send(msgspec.structs.replace(self._ready, leads=leads))
        self._connected.append(frontend)
        if leads:
            self._tell_counted(frontend)

    def takes_over(self, frontend: Frontend, request_id: int) -> bool:
        """A request has come over a frontend's pipe.

        Returns:
            Whether it has not ended, and came over another one, which was cut off: it starts again.
        """
        if len(self._came_over) > 2 * len(self._live_ids) + _MAX_ENDED:
            self._came_over = {live: self._came_over[live] for live in self._live_ids if live in self._came_over}
        before, self._came_over[request_id] = self._came_over.get(request_id), frontend
        return before not in (None, frontend) and request_id in self._live_ids

    def leave(self, frontend: Frontend) -> list[int]:
        """Stop serving a frontend.

        Returns:
            The ids of the requests that came over its pipe and have not ended: their output has no receiver any more.
                The same number can have two pipes: a stub is cut off and joins again, or its daemon answers so late
                that it was asked again.
        """
        led = self._connected[0] is frontend
        self._connected.remove(frontend)
        frontend.close()
        if led and self._connected:
            self._tell_counted(self._connected[0])
        ended = [request_id for request_id in self._live_ids if self._came_over.get(request_id) is frontend]
        self._came_over = {live: other for live, other in self._came_over.items() if other is not frontend}
        return ended

    def _tell_counted(self, leading: Frontend) -> None:
        """Send the counts so far to a new leading frontend, which continues from them."""
        if self._last_stats is not None:
            leading.send(StepMessage([], self._last_stats, leads=False))

    def send_step(self, message: StepMessage) -> None:
        """Send a step to the leading frontend and to each one with live requests or output: each gets its part."""
        self._last_stats = message.stats
        if len(self._connected) == 1:
            return self._connected[0].send(message)
        parts = split_step(message, self._columns)
        leads, listening = True, None
        for frontend in self._connected:
            part = parts.get(frontend.number)
            if part is None and not leads:
                listening = listening or set(map(_number, self._live_ids))
                if frontend.number not in listening:
                    continue
            deltas, tokens, failed = part or ([], TokenColumns(), [])
            frontend.send(StepMessage(deltas, message.stats, tokens, failed, leads))
            leads = False

    def send_idle(self, stats: StepStats) -> None:
        """Tell the leading frontend what KV tiers have done since the last step: reads and writes end after it."""
        last = self._last_stats
        told = (None, stats.blocks_free) if last is None else (last.kv_tiers, last.blocks_free)
        if self._connected and (stats.kv_tiers, stats.blocks_free) != told:
            self.send_step(StepMessage([], stats))


_Part = tuple[list[SequenceDelta], TokenColumns, list[RequestFailed]]


class _ColumnSplitter:
    """Splits token columns by frontend.  Most steps have the same rows as the step before."""

    def __init__(self) -> None:
        self._rows_of: tuple[list[int], list[int]] = [], []
        self._parts: dict[int, tuple[list[int], list[int], list[int]]] = {}  # rows, request ids, indices

    def split(self, tokens: TokenColumns) -> Iterator[tuple[int, TokenColumns]]:
        if self._rows_of != (tokens.request_ids, tokens.indices):
            self._rows_of, self._parts = (tokens.request_ids, tokens.indices), {}
            for row, (request_id, index) in enumerate(zip(*self._rows_of)):
                part = self._parts.setdefault(_number(request_id), ([], [], []))
                for column, value in zip(part, (row, request_id, index)):
                    column.append(value)
        token_ids = tokens.token_ids
        for number, (rows, request_ids, indices) in self._parts.items():
            yield number, TokenColumns(request_ids, indices, [token_ids[row] for row in rows])


def split_step(message: StepMessage, columns: _ColumnSplitter | None = None) -> dict[int, _Part]:
    """The output of a step, by the number of the frontend that receives it."""
    parts: dict[int, _Part] = {}

    def part(request_id: int) -> _Part:
        return parts.setdefault(_number(request_id), ([], TokenColumns(), []))

    for number, tokens in (columns or _ColumnSplitter()).split(message.tokens):
        parts[number] = [], tokens, []
    for delta in message.full_deltas:
        part(delta.request_id)[0].append(delta)
    for failure in message.failed:
        part(failure.request_id)[2].append(failure)
    return parts


class QueuedChannel:
    """Frames to a frontend whose pipe may be full: the engine never waits for it, since others wait, too.

    Frames that do not fit are kept, and a thread writes them.  A frontend that leaves too much unread is cut off.
    Output for a frontend that has closed its end is dropped silently: its reader thread notices.

    Args:
        end: the engine's end of the frontend's socket pair.  The frames are those of `multiprocessing`.
        max_unread: most bytes that are kept.
    """

    def __init__(self, end: socket.socket, max_unread: int = _MAX_UNREAD_BYTES) -> None:
        self._socket = end
        self._max_unread = max_unread
        self._changed = threading.Condition()  # guards the fields below
        self._unsent: deque[bytes] = deque()
        self._num_unsent = 0
        self._writer: threading.Thread | None = None
        self._closed = False

    @property
    def num_unsent(self) -> int:
        """Bytes that are kept."""
        return self._num_unsent

    def send_bytes(self, frame: bytes) -> None:
        data = struct.pack("!i", len(frame)) + frame
        with self._changed:
            if self._closed:
                return
            if not self._unsent:
                data = data[self._send_now(data) :]
            if data:
                self._keep(data)

    def _send_now(self, data: bytes) -> int:
        """Bytes written, or dropped because the other end is closed."""
        try:
            return self._socket.send(data, _NOW)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def _keep(self, data: bytes) -> None:
        self._num_unsent += len(data)
        if self._num_unsent > self._max_unread:
            self._cut_off()
            return
        self._unsent.append(data)
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="unsent", daemon=True)
            self._writer.start()
        self._changed.notify()

    def close(self) -> None:
        """End both directions: the frontend and the thread that reads from it see the end of the pipe."""
        with self._changed:
            if not self._closed:
                self._cut_off()

    def _cut_off(self) -> None:
        self._closed = True
        self._unsent.clear()
        with contextlib.suppress(OSError):  # it has gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._changed.notify()

    def _write(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._closed)
                if self._closed:
                    return
            poll.poll()
            with self._changed:
                while self._unsent:
                    data = self._unsent.popleft()
                    sent = self._send_now(data)
                    self._num_unsent -= sent
                    if sent < len(data):
                        self._unsent.appendleft(data[sent:])
                        break
