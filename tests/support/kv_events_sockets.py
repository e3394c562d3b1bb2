"""Publishers of KV events for tests: what they publish, what they are asked for, and when their threads take turns."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any
from unittest import mock

import zmq
from kv_events_rig import SECONDS, number

from inflight.engine.kv_events.known_blocks import Removed, Stored
from inflight.engine.kv_events.publisher import ZmqPublisher
from inflight.kv_events_config import KVEventsConfig

END = b"\xff" * 8


@contextmanager
def publishing(
    endpoint: str, block_size: int = 4, clock: Callable[[], float] = time.monotonic, **options: Any
) -> Iterator[ZmqPublisher]:
    made = ZmqPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, **options), block_size, clock)
    try:
        yield made
    finally:
        made.close()


def block_hash(index: int) -> bytes:
    return (2 * index).to_bytes(8, "big") + bytes(8)


def stored(index: int, parent: int | None = None, num_tokens: int = 4) -> Stored:
    before = None if parent is None else block_hash(parent)
    return Stored(before, [block_hash(index)], array("i", [index] * num_tokens), None)


def removed(*indices: int) -> Removed:
    return Removed([block_hash(index) for index in indices])


def known(*indices: int) -> set[int]:
    return {number(block_hash(index)) for index in indices}


def replay(endpoint: str, first: int) -> list[tuple[int, bytes]]:
    """A REQ socket would get the first answer only."""
    with closing(zmq.Context.instance().socket(zmq.DEALER)) as asks:
        asks.setsockopt(zmq.RCVTIMEO, SECONDS)
        asks.setsockopt(zmq.LINGER, 0)
        asks.connect(endpoint)
        asks.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        _, topic, number_, payload = asks.recv_multipart()
        while number_ != END:
            found.append((int.from_bytes(number_, "big"), payload))
            _, topic, number_, payload = asks.recv_multipart()
        assert (topic, payload) == (b"", b"")
        return found


class Probe:
    """A change that tells the test instead."""

    def __init__(self, reached: threading.Event, goes_on: threading.Event | None = None) -> None:
        self.reached, self.goes_on = reached, goes_on

    def tell(self, known_blocks: Any) -> Any:
        self.reached.set()
        if self.goes_on is not None:
            assert self.goes_on.wait(SECONDS / 1000)
        return removed().tell(known_blocks)


def through(engine: ZmqPublisher) -> None:
    """Wait until a turn of the thread has begun and ended."""
    reached, ended, poller = threading.Event(), threading.Event(), engine._poller

    def before_the_next() -> Any:
        ended.set()
        return poller()

    assert engine.put([Probe(reached)])
    assert reached.wait(SECONDS / 1000)
    with mock.patch.object(engine, "_poller", before_the_next):
        assert engine.put([removed()])
        assert ended.wait(SECONDS / 1000)


def end(engine: ZmqPublisher, goes_on: threading.Event) -> None:
    """Close it while its thread waits for `goes_on`."""
    closes = threading.Thread(target=engine.close)
    with mock.patch.object(engine._thread, "join", lambda timeout: goes_on.set()):  # it is told by now
        closes.start()
        closes.join()
    engine._thread.join(SECONDS / 1000)
    assert not engine._thread.is_alive()
    os.close(engine._wake)
