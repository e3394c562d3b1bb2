"""Publishes KV events over ZeroMQ, as vLLM does (`vllm/distributed/kv_events.py`).  No torch.

    message of the PUB socket     topic, number of the batch (8 bytes, big-endian), batch (MessagePack)
    question to the ROUTER        an empty frame, number of the first batch that is wanted (8 bytes)
    each of its answers           an empty frame, topic, number, batch; the last one has the number -1 and no batch

Numbers begin at 0 in each engine process; a gap in them shows a subscriber what it missed.  Beyond vLLM: the socket is
an XPUB one, which hears of subscriptions.  So a subscriber that is new, or returns after an engine's death, gets all
blocks, after an AllBlocksCleared; so does one that asks for batches that are not kept any more.  All hear what is sent
for a new subscriber, so that happens once a second at most.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
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
_RETRY_SECONDS = 1.0
_SNAPSHOT_SECONDS = 1.0
_CLOSE_SECONDS = 1.0
_ANSWERS = 16  # in flight; further questions wait
_ANSWER_HWM = 1000
_ANSWER_SECONDS = 10.0  # without one message that its asker had room for
_LOOK_SECONDS = 0.02  # between two looks whether an asker has room
_BACK_OFF_SECONDS = 0.1
_PAUSE_SECONDS = 2e-4


class _Closing(Exception):
    """The publisher is being closed; what is not sent by then is void."""


class _Answer:
    """The rest of an answer, as numbers and payloads, and until when its asker may have no room for more."""

    def __init__(self, messages: Sequence[tuple[bytes, bytes]], until: float) -> None:
        self.messages = deque(messages)
        self.until = until


class ZmqPublisher:
    """An `EventSink` with a thread of its own, which alone uses the sockets.

    An address that another process has, such as an engine that still answers its last requests, is tried again every
    second.

    Args:
        clock: seconds.

    Raises:
        ImportError: the package `pyzmq` is missing.
        ConfigError: the address can never be had.
    """

    def __init__(self, options: KVEventsConfig, block_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._zmq: Any = importlib.import_module("zmq")
        self.num_batches = self.num_dropped = 0
        self._options = options
        self._topic = options.topic.encode()
        self._known = KnownBlocks(block_size)
        self._queue: deque[Sequence[Change]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ends = False
        self._clock = clock
        self._tells_all = False  # as soon as it may: there is a new subscriber
        self._tells_all_at = -math.inf  # not before
        self._retry_at = -math.inf
        self._told_why_unbound = False
        self._answers: dict[bytes, _Answer] = {}  # by asker
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
                self._replay = self._socket(self._zmq.ROUTER, options.replay_endpoint, _ANSWER_HWM)
                self._replay.setsockopt(self._zmq.ROUTER_MANDATORY, 1)  # else what an asker has no room for is lost
            self._unbound = [one for one in self._unbound if not self._is_bound(*one)]
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

    def _is_bound(self, made: Any, endpoint: str) -> bool:
        """Listen at the endpoint; False: another process does.

        Raises:
            ConfigError: the address is none of this machine.
        """
        try:
            if _is_taken(endpoint):
                return False
            made.bind(endpoint)
        except self._zmq.ZMQError as error:
            if error.errno == self._zmq.EADDRINUSE:
                return False
            why = f"{error.strerror}; give an address of this machine"
            raise ConfigError(f"kv_events_config: cannot listen at {endpoint}: {why}") from None
        _log.info("kv_events_config: all who reach %s can subscribe, and read token ids of prompts", endpoint)
        return True

    def _retry(self) -> None:
        """Listen where another process did, if it is time."""
        if not self._unbound or self._clock() < self._retry_at:
            return
        self._retry_at = self._clock() + _RETRY_SECONDS
        self._unbound = [one for one in self._unbound if not self._is_bound_now(*one)]

    def _is_bound_now(self, made: Any, endpoint: str) -> bool:
        """As `_is_bound`, but what is wrong with the address is only logged, once: the engine runs."""
        try:
            return self._is_bound(made, endpoint)
        except ConfigError as error:
            if not self._told_why_unbound:
                _log.error("%s; it is tried again every second", error)
            self._told_why_unbound = True
            return False

    def _publish(self) -> None:
        while not self._ends:
            ready = self._poller().poll(self._milliseconds())
            try:
                self._turn([one for one, _ in ready])
            except Exception:  # of one batch or one question: the others go on
                if self._ends:
                    break
                _log.exception("kv_events_config: a batch was not published")
                self._tells_all = True
                time.sleep(_BACK_OFF_SECONDS)
        self._send([AllBlocksCleared()])
        self._context.destroy(linger=int(_CLOSE_SECONDS * 500))

    def _poller(self) -> Any:
        """Of what the next turn can read."""
        poller = self._zmq.Poller()
        for one in (self._wake, self._events, self._replay if len(self._answers) < _ANSWERS else None):
            if one is not None:
                poller.register(one, self._zmq.POLLIN)
        return poller

    def _milliseconds(self) -> int | None:
        """Until the next turn, if nothing comes before it."""
        now = self._clock()
        times = [self._tells_all_at] if self._tells_all else []
        times += [self._retry_at] if self._unbound else []
        times += [now + _LOOK_SECONDS] if self._answers else []
        return math.ceil(1000 * max(0.0, min(times) - now)) if times else None

    def _turn(self, ready: Container[Any]) -> None:
        """Publish what there is, then answer.  Only `ready` sockets are read: the error of an empty one takes long."""
        if self._wake in ready:
            os.eventfd_read(self._wake)
        while self._events in ready and not self._ends and (heard := self._received(self._events)) is not None:
            self._tells_all |= heard[0][:1] == b"\x01" and self._topic.startswith(heard[0][1:])
        if self._tells_all and self._clock() >= self._tells_all_at:
            self._tells_all = False
            self._send_all()
            self._tells_all_at = self._clock() + _SNAPSHOT_SECONDS
        while self._queue and not self._ends:
            self._send([change.tell(self._known) for change in self._queue.popleft()])
        if self._replay in ready and not self._ends and (asked := self._received(self._replay)) is not None:
            self._answer(asked)
        for asker in list(self._answers):
            self._go_on(asker)
        self._retry()

    def _received(self, socket: Any) -> list[bytes] | None:
        try:
            found: list[bytes] = socket.recv_multipart(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return None
        return found

    def _send_all(self) -> None:
        """Tell everything, to all: others learn nothing new."""
        for events in self._known.snapshot(self._pause):
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
        """Begin to send what is kept of the batches asked for; if that is not all, everything instead, in their place.

        A question of the same asker that is not through yet is forgotten.
        """
        if len(asked) != 3 or asked[1] or len(asked[2]) != 8:
            _log.warning("kv_events_config: a question for a replay is not an empty frame and eight bytes")
            return
        first, kept = int.from_bytes(asked[2], "big"), list(self._kept)
        batches = [(number, payload) for number, payload in kept if number >= first]
        if kept and first < kept[0][0]:
            found, last = list(self._known.snapshot(self._pause)), kept[-1][0]
            if len(found) > (room := last + 1 - first):  # numbers that it does not have yet
                found[room - 1 :] = [list(itertools.chain(*found[room - 1 :]))]
            batches = []
            for number, events in enumerate(found, last + 1 - len(found)):
                self._pause()
                batches.append((number, self._payload(events)))
        messages = [(number.to_bytes(8, "big"), payload) for number, payload in batches]
        self._answers[asked[0]] = _Answer([*messages, (_END, b"")], self._clock() + _ANSWER_SECONDS)

    def _go_on(self, asker: bytes) -> None:
        """Send as much of its answer as it has room for."""
        answer = self._answers[asker]
        while answer.messages and not self._ends:
            number, payload = answer.messages[0]
            topic = b"" if number == _END else self._topic
            try:
                self._replay.send_multipart((asker, b"", topic, number, payload), self._zmq.NOBLOCK)
            except self._zmq.Again:
                if self._clock() < answer.until:
                    return
                break
            except self._zmq.ZMQError:  # it is gone
                break
            answer.messages.popleft()
            answer.until = self._clock() + _ANSWER_SECONDS
        del self._answers[asker]

    def _pause(self) -> None:
        """Let a step have Python's lock, for which it would wait for 5 ms."""
        if self._ends:
            raise _Closing
        time.sleep(_PAUSE_SECONDS)


def _is_taken(endpoint: str) -> bool:
    """Whether another process listens at the path of a Unix socket: ZeroMQ would remove it, and report nothing."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or path.startswith("@"):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True
