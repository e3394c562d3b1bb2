"""Publishes KV events over ZeroMQ, as vLLM does (`vllm/distributed/kv_events.py`).  No torch.

    message of the PUB socket     topic, number of the batch (8 bytes, big-endian), batch (MessagePack)
    question to the ROUTER        an empty frame, number of the first batch that is wanted (8 bytes)
    each of its answers           an empty frame, topic, number, batch; the last one has the number -1 and no batch

Numbers begin at 0 in each engine process; a gap in them shows a subscriber what it missed.  Beyond vLLM: the socket is
an XPUB one, which hears of subscriptions.  So a subscriber that is new, or returns after an engine's death, gets all
blocks, after an AllBlocksCleared; so does one that asks for batches that are not kept any more.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Container, Sequence
from typing import Any

import msgspec

from inflight.config import ConfigError
from inflight.engine.kv_events.endpoint import listens, of_rank
from inflight.engine.kv_events.known_blocks import AllBlocksCleared, Change, EventBatch, KnownBlocks
from inflight.kv_events_config import KVEventsConfig

__all__ = ["ZmqPublisher"]

_log = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
_MOST_KEPT_BYTES = 64 * 2**20
_RETRY_MILLISECONDS = 1000
_CLOSE_SECONDS = 1.0
_MOST_PARTS = 2**16  # of a snapshot: of 8 million blocks
_BACK_OFF_SECONDS = 0.1
_PAUSE_SECONDS = 2e-4


class ZmqPublisher:
    """An `EventSink` with a thread of its own, which alone uses the sockets.

    An address that another process has, such as an engine that still answers its last requests, is tried again every
    second.

    Raises:
        ImportError: the package `pyzmq` is missing.
        ConfigError: the address can never be had.
    """

    def __init__(self, options: KVEventsConfig, block_size: int) -> None:
        self._zmq: Any = importlib.import_module("zmq")
        self.num_batches = self.num_dropped = 0
        self._options = options
        self._topic = options.topic.encode()
        self._known = KnownBlocks(block_size)
        self._queue: deque[Sequence[Change]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ends = False
        self._tells_all = False  # next: there is a new subscriber
        self._sent = itertools.count()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._context = self._zmq.Context()
        self._unbound: list[tuple[Any, str]] = []
        self._events = self._socket(self._zmq.XPUB, options.endpoint, options.hwm)
        self._events.setsockopt(self._zmq.XPUB_VERBOSE, 1)  # also of subscriptions that another one has
        self._replay: Any = None
        try:
            if options.replay_endpoint is not None:
                self._replay = self._socket(
                    self._zmq.ROUTER, options.replay_endpoint, options.buffer_steps + _MOST_PARTS
                )
            self._bind()
        except BaseException:
            self._context.destroy(linger=0)
            os.close(self._wake)
            raise
        for _, endpoint in self._unbound:
            _log.warning("kv_events_config: another process has %s; it is tried again every second", endpoint)
        self._thread = threading.Thread(target=self._publish, name="kv-events", daemon=True)
        self._thread.start()

    def put(self, changes: Sequence[Change]) -> bool:
        if len(self._queue) >= self._options.max_queue_size or not self._thread.is_alive():
            self.num_dropped += 1
            return False
        self.num_batches += 1
        self._queue.append(changes)
        os.eventfd_write(self._wake, 1)
        return True

    def close(self) -> None:
        if self._ends:
            return
        self._ends = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            os.close(self._wake)

    def _socket(self, kind: int, endpoint: str, hwm: int) -> Any:
        made = self._context.socket(kind)
        made.setsockopt(self._zmq.SNDHWM, hwm)
        made.setsockopt(self._zmq.LINGER, 0)
        made.setsockopt(self._zmq.MAXMSGSIZE, 2**16)  # of what subscribers send
        made.setsockopt(self._zmq.TCP_KEEPALIVE, 1)  # else batches wait for a machine that is gone
        if "[" in endpoint or "::" in endpoint:
            made.setsockopt(self._zmq.IPV6, 1)
        endpoint = of_rank(endpoint, self._options.data_parallel_rank)
        if listens(endpoint):
            self._unbound.append((made, endpoint))
        else:
            made.connect(endpoint)
            _log.info("kv_events_config: connects to a subscriber at %s", endpoint)
        return made

    def _bind(self) -> None:
        self._unbound = [(made, endpoint) for made, endpoint in self._unbound if not self._is_bound(made, endpoint)]

    def _is_bound(self, socket: Any, endpoint: str) -> bool:
        """Listen at the endpoint; False: another process does.

        Raises:
            ConfigError: the address is none of this machine.
        """
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            if error.errno == self._zmq.EADDRINUSE:
                return False
            why = f"{error.strerror}; give an address of this machine"
            raise ConfigError(f"kv_events_config: cannot listen at {endpoint}: {why}") from None
        _log.info("kv_events_config: all who reach %s can subscribe, and read token ids of prompts", endpoint)
        return True

    def _publish(self) -> None:
        poller = self._zmq.Poller()
        for one in (self._wake, self._events, self._replay):
            if one is not None:
                poller.register(one, self._zmq.POLLIN)
        while not self._ends:
            ready = poller.poll(0 if self._tells_all else _RETRY_MILLISECONDS if self._unbound else None)
            try:
                self._turn([one for one, _ in ready])
            except Exception:  # of one batch or one question: the others go on
                _log.exception("kv_events_config: a batch was not published")
                self._tells_all = True
                time.sleep(_BACK_OFF_SECONDS)
        self._send([AllBlocksCleared()])
        self._context.destroy(linger=int(_CLOSE_SECONDS * 500))

    def _turn(self, ready: Container[Any]) -> None:
        """Publish what there is, then answer.  Only `ready` sockets are read: the error of an empty one takes long."""
        if self._wake in ready:
            os.eventfd_read(self._wake)
        if self._unbound:
            self._bind()
        while self._events in ready and (heard := self._received(self._events)) is not None:
            self._tells_all |= heard[0][:1] == b"\x01" and self._topic.startswith(heard[0][1:])
        if self._tells_all:
            self._tells_all = False
            self._send_all()
        while self._queue:
            self._send([change.tell(self._known) for change in self._queue.popleft()])
        while self._replay in ready and (asked := self._received(self._replay)) is not None:
            self._answer(asked)

    def _received(self, socket: Any) -> list[bytes] | None:
        try:
            found: list[bytes] = socket.recv_multipart(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return None
        return found

    def _send_all(self) -> None:
        """Tell everything, to all: others learn nothing new."""
        for events in self._known.snapshot(_pause):
            self._send(events)

    def _send(self, events: list[Any]) -> None:
        number, payload = next(self._sent), self._payload(events)
        if self._replay is not None:
            self._kept.append((number, payload))
            self._kept_bytes += len(payload)
            while len(self._kept) > self._options.buffer_steps or (
                self._kept_bytes > _MOST_KEPT_BYTES and len(self._kept) > 1
            ):
                self._kept_bytes -= len(self._kept.popleft()[1])
        self._events.send_multipart((self._topic, number.to_bytes(8, "big"), payload), self._zmq.NOBLOCK)

    def _payload(self, events: list[Any]) -> bytes:
        return self._encoder.encode(EventBatch(time.time(), events, self._options.data_parallel_rank))

    def _answer(self, asked: list[bytes]) -> None:
        """Send what is kept of the batches asked for; if that is not all, everything instead, in their place."""
        if len(asked) != 3 or asked[1] or len(asked[2]) != 8:
            _log.warning("kv_events_config: a question for a replay is not an empty frame and eight bytes")
            return
        first, kept = int.from_bytes(asked[2], "big"), list(self._kept)
        batches = [(number, payload) for number, payload in kept if number >= first]
        if kept and first < kept[0][0]:
            found, last = list(self._known.snapshot(_pause)), kept[-1][0]
            if len(found) > (room := last + 1 - first):  # numbers that it does not have yet
                found[room - 1 :] = [list(itertools.chain(*found[room - 1 :]))]
            batches = [(last + 1 - len(found) + index, self._payload(one)) for index, one in enumerate(found)]
        for number, payload in batches:
            self._reply(asked[0], self._topic, number.to_bytes(8, "big"), payload)
        self._reply(asked[0], b"", _END, b"")

    def _reply(self, to: bytes, *frames: bytes) -> None:
        with contextlib.suppress(self._zmq.Again, self._zmq.ZMQError):  # it is gone, or reads nothing
            self._replay.send_multipart((to, b"", *frames), self._zmq.NOBLOCK)


def _pause() -> None:
    """Let a step have Python's lock, for which it would wait for 5 ms."""
    time.sleep(_PAUSE_SECONDS)
