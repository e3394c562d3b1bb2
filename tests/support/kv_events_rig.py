"""A subscriber to KV events, with decoding of its own, and an event sink without sockets."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import zmq

from inflight.engine import assembly
from inflight.engine.core import EngineCore
from inflight.engine.events import EngineListener
from inflight.engine.kv_events.block_events import BlockEvents
from inflight.engine.kv_events.known_blocks import Change, EventBatch, KnownBlocks
from inflight.engine.kv_events.kv_events import KVEvents
from inflight.engine.kv_pool import KVPool
from inflight.engine.request import Request
from inflight.engine.sampling_params import SamplingParams

SECONDS = 20_000  # milliseconds; a test that waits so long has failed


class Block(NamedTuple):
    parent: int | None
    token_ids: list[int]
    lora_name: str | None


class Subscriber:
    """A router's knowledge of one engine.

    Attributes:
        last: number of the last batch.
        gaps: how often batches were missing before one.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.last = -1
        self.gaps = 0
        self.num_cleared = 0

    def take(self, payload: bytes, number: int | None = None) -> None:
        if number is not None:
            self.gaps += number > self.last + 1
            self.last = number
        ts, events, *rank = msgspec.msgpack.decode(payload)
        assert ts > 1e9
        assert len(rank) <= 1
        for event in events:
            getattr(self, event.pop("type"))(**event)

    def BlockStored(self, **event: Any) -> None:
        hashes, size = event["block_hashes"], event["block_size"]
        assert hashes
        assert all(0 <= one < 2**63 for one in hashes)
        assert event["medium"] == "GPU"
        assert event["lora_id"] is None
        assert len(event["token_ids"]) == size * len(hashes)
        name = event["lora_name"]
        assert event["extra_keys"] == [None if name is None else [name]] * len(hashes)
        for index, (parent, block) in enumerate(zip([event["parent_block_hash"], *hashes], hashes)):
            self.blocks[block] = Block(parent, event["token_ids"][index * size : (index + 1) * size], name)

    def BlockRemoved(self, block_hashes: list[int], medium: str) -> None:
        assert medium == "GPU"
        for block in block_hashes:
            if self.num_cleared:  # else it hears the first batches before it was told what there is
                del self.blocks[block]  # it knows each of them

    def AllBlocksCleared(self) -> None:
        self.blocks.clear()
        self.num_cleared += 1

    def prefix_of(self, block: int) -> list[int] | None:
        """All tokens up to the block's end; None: a block before it is not known."""
        found: list[int] = []
        at: int | None = block
        while at is not None:
            if at not in self.blocks:
                return None
            found[:0] = self.blocks[at].token_ids
            at = self.blocks[at].parent
        return found


class Ear:
    """A subscriber with a socket."""

    def __init__(self, endpoint: str, topic: str = "", **options: int) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVTIMEO, SECONDS)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 5)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.subscribe(topic.encode())
        self.socket.connect(endpoint)
        self.knows = Subscriber()
        self.topics: set[bytes] = set()

    def close(self) -> None:
        self.socket.close()

    def hear(self) -> int:
        topic, number_, payload = self.socket.recv_multipart()
        self.topics.add(topic)
        self.knows.take(payload, int.from_bytes(number_, "big"))
        return self.knows.last

    def hear_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.hear()


class DirectSink:
    """An `EventSink` whose subscriber hears at once; batches for which `refuses` is next are dropped."""

    def __init__(self, block_size: int, refuses: Iterable[bool] = ()) -> None:
        self.known = KnownBlocks(block_size)
        self.subscriber = Subscriber()
        self.num_batches = self.num_dropped = 0
        self._refuses = iter(refuses)

    def put(self, changes: Sequence[Change]) -> bool:
        assert changes
        if next(self._refuses, False):
            self.num_dropped += 1
            return False
        events = [change.tell(self.known) for change in changes]
        self.subscriber.take(msgspec.msgpack.encode(EventBatch(2e9, events, 0)), self.num_batches)
        self.num_batches += 1
        return True

    def close(self) -> None:
        pass


@contextmanager
def recorded(sink: Any) -> Iterator[None]:
    """Cores that are made within tell `sink`."""
    with mock.patch.object(assembly, "make_core", functools.partial(assembly.make_core, recorder=KVEvents(sink))):
        yield


class Arrived(EngineListener):
    """All requests that came."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def arrived(self, sequences: Sequence[Request]) -> None:
        self.requests += sequences


def events_of(core: EngineCore) -> BlockEvents:
    (found,) = (one for one in core.scheduler.listeners if type(one) is BlockEvents)
    return found


def numbers(pool: KVPool, requests: Sequence[Request], wanted: Callable[[Request], bool]) -> set[int]:
    """Of the blocks in the prefix cache that some of the requests have as prefix, the numbers in events."""
    hashes = {one for request in requests if wanted(request) for one in request.block_hashes}
    return {number(one) for one in pool._block_of if one in hashes}


def number(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:8], "big") >> 1


def block_hashes(block_size: int, token_ids: list[int]) -> list[bytes]:
    """The pool's hashes of these tokens, computed from them alone."""
    request = Request(0, array("i", token_ids), SamplingParams(), cache_salts=("",))
    KVPool(1, block_size)._hash(request, len(token_ids) // block_size)
    return request.block_hashes


def last_number(pool: KVPool, token_ids: list[int]) -> int:
    """Of the last block of these tokens."""
    return number(block_hashes(pool.block_size, token_ids)[-1])
