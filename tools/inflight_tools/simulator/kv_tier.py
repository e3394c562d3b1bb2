"""KV tiers on the virtual clock: the engine's own tiers and their admission, with stores that have no bytes.

A block is one byte long here, so that seals, keys and counts are those of the engine and nothing large is copied; times
and bounds count the bytes that it would have.
"""

from __future__ import annotations

import errno
import heapq
import math
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from inflight.config import ConfigError, parse_bytes
from inflight.engine.tiers.base import Frames, TornError
from inflight.engine.tiers.seal import Seal
from inflight.engine.tiers.tier import Tier
from inflight.engine.tiers.tiers import Tiers

__all__ = ["SimulatedTiers", "TierSpec", "VirtualStore", "parse_kv_tier"]

_TYPES = "host", "disk", "redis"
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LOOK_SECONDS = 1e-3  # for which an engine waits for a tier that answers at once
_CPU_SECONDS_PER_BYTE = 5e-4 / 2**20  # to copy and verify


@dataclass(frozen=True)
class TierSpec:
    """A place that keeps KV.

    Attributes:
        type: "host" ends with its engine, "disk" belongs to a replica and outlives its engines, all share a "redis".
        size: bytes.
        bytes_per_second: of each thread that reads or writes.
        latency: seconds of each access.
    """

    type: str
    size: int
    bytes_per_second: float
    latency: float

    def __str__(self) -> str:
        rate, latency = self.bytes_per_second / 1e9, 1e3 * self.latency
        return f"{self.type} of {self.size / 2**30:.3g} GiB, {rate:.3g} GB/s, {latency:.3g} ms"


def parse_kv_tier(text: str) -> TierSpec:
    """`TYPE:SIZE:RATE:LATENCY`, such as `disk:100GiB:1.6GB/s:0.2ms`.

    Raises:
        ConfigError: anything else.
    """
    parts = [part.strip() for part in text.split(":")]
    latency = re.fullmatch(r"(\d+(?:\.\d*)?)\s*(us|ms|s)", parts[-1])
    if len(parts) != 4 or parts[0] not in _TYPES or not parts[2].endswith("/s") or latency is None:
        raise ConfigError(
            f"--kv-tier {text!r}: expected TYPE:SIZE:RATE:LATENCY with one of {', '.join(_TYPES)}, such as "
            "disk:100GiB:1.6GB/s:0.2ms"
        )
    size, rate = parse_bytes(parts[1]), parse_bytes(parts[2].removesuffix("/s"))
    if not size or not rate:
        raise ConfigError(f"--kv-tier {text!r}: size and rate must be more than 0")
    return TierSpec(parts[0], size, float(rate), float(latency[1]) * _UNITS[latency[2]])


class Engine(Protocol):
    """Has the clock."""

    now: float


class TaskClock:
    """The time of a tier's task that runs from one virtual moment to a later one, else the engine's.

    Attributes:
        cpu_seconds: that tasks have taken a core, ever.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._task: float | None = None
        self.cpu_seconds = 0.0

    def __call__(self) -> float:
        return self._engine.now if self._task is None else self._task

    def run(self, start: float, work: Callable[..., Any], args: tuple[Any, ...]) -> tuple[float, Any]:
        """Do a task that begins at `start`; when it ends, and its result."""
        self._task = start
        try:
            result = work(*args)
            return self._task, result
        finally:
            self._task = None

    def spend(self, seconds: float, cpu_seconds: float = 0.0) -> None:
        """The task takes this long."""
        assert self._task is not None
        self._task += seconds
        self.cpu_seconds += cpu_seconds


class VirtualStore:
    """Implements `KVStore`: keys, and how many blocks each has."""

    def __init__(self, spec: TierSpec) -> None:
        self.spec = spec
        self.extents: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()  # key -> seal, bytes; oldest use first
        self.num_bytes = 0


class _Access:
    """Implements `KVStore` for one engine: a store, and the time that it takes to use it."""

    def __init__(self, store: VirtualStore, clock: TaskClock, bytes_per_block: int) -> None:
        self._store, self._clock, self._bytes_per_block = store, clock, bytes_per_block

    @property
    def num_bytes(self) -> int:
        return self._store.num_bytes

    def find(self, keys: Sequence[bytes]) -> int:
        self._clock.spend(self._store.spec.latency)
        return next((index for index, key in enumerate(keys) if key not in self._store.extents), len(keys))

    def first_of(self, keys: Sequence[bytes]) -> int:
        self._clock.spend(self._store.spec.latency)
        return next((index for index, key in enumerate(keys) if key in self._store.extents), len(keys))

    def load(self, key: bytes, frames: Frames) -> bool:
        kept = self._store.extents.get(key)
        if kept is None:
            self._clock.spend(self._store.spec.latency)
            return False
        seal, num_bytes = kept
        if num_bytes != self._move(frames):
            raise TornError(f"{num_bytes} bytes are kept, and other ones were expected")
        self._store.extents.move_to_end(key)
        frames[0][:] = seal
        return True

    def store(self, key: bytes, frames: Frames) -> bool:
        num_bytes, store = self._move(frames), self._store
        if num_bytes > store.spec.size:
            raise OSError(errno.ENOSPC, f"an extent has {num_bytes} bytes, and the tier's size is {store.spec.size}")
        self.drop(key)
        while store.num_bytes + num_bytes > store.spec.size:
            self.drop(next(iter(store.extents)))
        store.extents[key] = bytes(frames[0]), num_bytes
        store.num_bytes += num_bytes
        return True

    def drop(self, key: bytes) -> None:
        if key in self._store.extents:
            self._store.num_bytes -= self._store.extents.pop(key)[1]

    def close(self) -> None:
        pass

    def _move(self, frames: Frames) -> int:
        """Spend the time for the blocks in `frames`, behind the seal; returns their bytes."""
        num_bytes = sum(frame.nbytes for frame in frames[1:]) * self._bytes_per_block
        seconds = self._store.spec.latency + num_bytes / self._store.spec.bytes_per_second
        self._clock.spend(seconds, num_bytes * _CPU_SECONDS_PER_BYTE)
        return num_bytes


class VirtualWorkers:
    """Implements `Workers`: so many tasks at a time, which take virtual time.

    Args:
        is_waited_for: the engine's thread waits for a result that comes in a moment.
    """

    def __init__(self, engine: Engine, clock: TaskClock, count: int, most: int, is_waited_for: bool) -> None:
        self._engine, self._clock, self._most, self._is_waited_for = engine, clock, most, is_waited_for
        self._free = [0.0] * count  # heap: since when each thread has nothing to do, or when it will be through
        self._queue: deque[tuple[float, Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._running: list[tuple[float, int, Future[Any], Any]] = []  # heap by the end
        self._num_begun = 0

    @property
    def next_end(self) -> float:
        """When the next task ends; infinite if none has begun."""
        return self._running[0][0] if self._running else math.inf

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._queue.append((self._engine.now, future, work, args))
        self.advance()
        if self._is_waited_for and 0 < self.next_end - self._engine.now <= _LOOK_SECONDS:
            self._engine.now = self.next_end
            self.advance()
        return future

    def offer(self, work: Callable[..., Any], *args: Any) -> bool:
        if len(self._queue) >= self._most:
            return False
        self.submit(work, *args)
        return True

    def finish(self, seconds: float) -> bool:
        return True

    def advance(self, begins_until: float | None = None) -> None:
        """Begin and end what is due by now; what begins later, until then, begins, too."""
        now = self._engine.now
        while self._queue and self._free[0] <= (now if begins_until is None else begins_until):
            submitted, future, work, args = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                end, result = self._clock.run(max(submitted, self._free[0]), work, args)
                heapq.heapreplace(self._free, end)
                heapq.heappush(self._running, (end, self._num_begun, future, result))
                self._num_begun += 1
        while self._running and self._running[0][0] <= now:
            _, _, future, result = heapq.heappop(self._running)
            future.set_result(result)


class VirtualBlocks:
    """Implements `KVBlocks` with a byte for each block."""

    def __init__(self, bytes_per_block: int) -> None:
        self.bytes_per_block = bytes_per_block

    def fill(self, blocks: Sequence[int], read: Callable[[Frames], bool]) -> bool:
        return read([memoryview(bytearray(len(blocks)))])

    def copy(self, blocks: Sequence[int]) -> memoryview:
        return memoryview(bytes(len(blocks)))


class SimulatedTiers:
    """The tiers of a simulated engine.

    Args:
        engine: has the clock, which moves on while the engine waits for an answer.
        stores: the fastest first.

    Attributes:
        tiers: as the engine core takes them.
        stores: of the tiers, in their order.
    """

    def __init__(self, engine: Engine, stores: Sequence[VirtualStore], bytes_per_block: int) -> None:
        self.stores = stores
        self._engine, self._clock = engine, TaskClock(engine)
        self._workers: list[VirtualWorkers] = []
        self._charged = 0.0
        seal, blocks = Seal(bytes(16)), VirtualBlocks(bytes_per_block)
        tiers = [
            Tier(
                store.spec.type,
                _Access(store, self._clock, bytes_per_block),
                seal,
                self._made,
                clock=self._clock,
                cpu_clock=lambda: self._clock.cpu_seconds,
            )
            for store in stores
        ]
        self.tiers = Tiers(tiers, blocks, seal, self._clock)

    def succeed(self, former: SimulatedTiers) -> None:
        """Take over the disk of a former engine."""
        for store, old in zip(self.stores, former.stores):
            if store.spec.type == "disk":
                store.extents, store.num_bytes = old.extents, old.num_bytes

    def advance(self) -> None:
        """Begin and end what is due by now."""
        for workers in self._workers:
            workers.advance()

    def settle(self) -> None:
        """The engine has nothing to do: its clock stands still, and what waits to be written is written."""
        for workers in self._workers:
            workers.advance(math.inf)

    @property
    def next_end(self) -> float:
        """When the next task of a tier ends; infinite if none has begun."""
        return min((workers.next_end for workers in self._workers), default=math.inf)

    def cpu_seconds(self) -> float:
        """That tasks have taken a core since the last call."""
        charged, self._charged = self._charged, self._clock.cpu_seconds
        return self._charged - charged

    def _made(self, count: int, name: str, most: int) -> VirtualWorkers:
        workers = VirtualWorkers(self._engine, self._clock, count, most, is_waited_for=name.endswith("-find"))
        self._workers.append(workers)
        return workers
