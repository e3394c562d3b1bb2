"""KV tiers on the virtual clock: the engine's own tiers and their admission, with stores that have no bytes.

A block is one byte long here, so that seals, keys and counts are those of the engine and nothing large is copied; times
and bounds count the bytes that it would have.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import math
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from inflight.config import ConfigError, parse_bytes
from inflight.engine.policies.tier_admission import LOOK_SECONDS
from inflight.engine.tiers.base import Fill, Frames, TornError

__all__ = [
    "CPU_SECONDS_PER_BYTE",
    "Access",
    "Engine",
    "TaskClock",
    "TierSpec",
    "VirtualStore",
    "VirtualWorkers",
    "parse_kv_tier",
    "parse_latency",
]

_TYPES = "host", "disk", "redis"
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
CPU_SECONDS_PER_BYTE = 5e-4 / 2**20  # to copy and verify


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
    latency = parse_latency(parts[-1])
    if len(parts) != 4 or parts[0] not in _TYPES or not parts[2].endswith("/s") or latency is None:
        raise ConfigError(
            f"--kv-tier {text!r}: expected TYPE:SIZE:RATE:LATENCY with one of {', '.join(_TYPES)}, such as "
            'disk:100GiB:1.6GB/s:0.2ms; for "lmcache", give the type of its medium: '
            '"disk", or "redis" if replicas share it'
        )
    size, rate = parse_bytes(parts[1]), parse_bytes(parts[2].removesuffix("/s"))
    if not size or not rate:
        raise ConfigError(f"--kv-tier {text!r}: size and rate must be more than 0")
    return TierSpec(parts[0], size, float(rate), latency)


def parse_latency(text: str) -> float | None:
    """Seconds of `0.2ms`, `50us` or `1s`; None: it is something else."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*(us|ms|s)", text)
    return None if found is None else float(found[1]) * _UNITS[found[2]]


class Engine(Protocol):
    """Has the clock."""

    now: float


class TaskClock:
    """The time of a tier's task, which runs from one virtual moment to a later one, else the engine's.

    Attributes:
        cpu_seconds: that tasks have taken a core, ever.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._task: float | None = None
        self.cpu_seconds = 0.0

    def __call__(self) -> float:
        return self._engine.now if self._task is None else self._task

    def run(self, start: float, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Do a task that has begun at `start`; returns its result."""
        self._task = start
        try:
            return work(*args)
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


class Access:
    """Implements `KVStore` for one engine: a store, and the time that it takes to use it."""

    def __init__(self, store: VirtualStore, clock: TaskClock, bytes_per_block: int) -> None:
        self._store, self._clock, self._bytes_per_block = store, clock, bytes_per_block

    @property
    def num_bytes(self) -> int:
        return self._store.num_bytes

    def begun(self, kind: str, args: tuple[Any, ...], start: float) -> tuple[float, tuple[Any, ...]]:
        """How long a task takes that begins at `start`, and its arguments: what it writes is copied then.

        Args:
            kind: "find", "load" or "write".
            args: of the task, a method of `Tier`.
        """
        latency = self._store.spec.latency
        if kind == "find":
            keys, behind = args
            return latency * (bool(keys) + bool(behind(self._num_found(keys)))), args
        if kind == "load":
            key, fill = args
            return self._seconds(self.bytes_asked(fill)) if key in self._store.extents else latency, args
        key, copied = args
        copy = copied()
        return 0.0 if copy is None else self._seconds(self.bytes_of(copy)), (key, lambda: copy)

    def find(self, keys: Sequence[bytes]) -> int:
        self._clock.spend(self._store.spec.latency)
        return self._num_found(keys)

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
        num_bytes = self.bytes_of(frames[1:])
        self._clock.spend(self._seconds(num_bytes), num_bytes * CPU_SECONDS_PER_BYTE)
        return num_bytes

    def _num_found(self, keys: Sequence[bytes]) -> int:
        return next((index for index, key in enumerate(keys) if key not in self._store.extents), len(keys))

    def bytes_asked(self, fill: Fill) -> int:
        """Bytes that a load will read."""
        asked = 0

        def look(frames: Frames) -> bool:
            nonlocal asked
            asked = self.bytes_of(frames)
            return False

        fill(look)
        return asked

    def bytes_of(self, frames: Frames) -> int:
        return sum(frame.nbytes for frame in frames) * self._bytes_per_block

    def _seconds(self, num_bytes: int) -> float:
        return self._store.spec.latency + num_bytes / self._store.spec.bytes_per_second


_task_numbers = itertools.count(1)


class _Task(NamedTuple):
    """A task that has begun."""

    end: float
    number: int
    asked: float
    start: float
    future: Future[Any]
    work: Callable[..., Any]
    args: tuple[Any, ...]


class VirtualWorkers:
    """Implements `Workers`: so many tasks at a time, which take virtual time and have their effect when they end.

    Args:
        kind: of their tasks, see `Access.begun`.

    Attributes:
        began: task in progress -> when it began; the tier's own, where that observes its tasks.
    """

    def __init__(self, engine: Engine, clock: TaskClock, access: Access, count: int, kind: str, most: int) -> None:
        self._engine, self._clock, self._access, self._kind, self._most = engine, clock, access, kind, most
        self.began: dict[int, float] = {}
        self._free = [0.0] * count  # heap: since when each thread has had nothing to do
        self._queue: deque[tuple[float, Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._running: list[_Task] = []  # heap

    @property
    def next_end(self) -> float:
        """When the next task ends; infinite if none has begun."""
        return self._running[0].end if self._running else math.inf

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._queue.append((self._engine.now, future, work, args))
        self.advance(self._engine.now)
        if self._kind == "find" and 0 < self.next_end - self._engine.now <= LOOK_SECONDS:
            self._engine.now = self.next_end  # the engine's thread waits for it
            self.advance(self._engine.now)
        return future

    def ends(self, each: float) -> dict[bytes, tuple[float, float]]:
        """When each write was given that waits or runs, and when it ends: by key.

        Args:
            each: seconds of one that has not begun.
        """
        ends = {task.args[0]: (task.asked, task.end) for task in self._running}
        free = max([*self._free, *(task.end for task in self._running)])
        for asked, _, _, args in self._queue:
            free = max(free, asked) + each
            ends[args[0]] = asked, free
        return ends

    def offer(self, work: Callable[..., Any], *args: Any) -> bool:
        if len(self._queue) >= self._most:
            return False
        self.submit(work, *args)
        return True

    def finish(self, seconds: float) -> bool:
        return True

    def advance(self, until: float) -> None:
        """Begin and end, in the order of their times, what is due by then."""
        while True:
            begin = max(self._queue[0][0], self._free[0]) if self._queue and self._free else math.inf
            if begin < math.inf and begin <= min(until, self.next_end):
                self._begin(begin)
            elif self._running and self.next_end <= until:
                self._end()
            else:
                return

    def _begin(self, start: float) -> None:
        asked, future, work, args = self._queue.popleft()
        if future.set_running_or_notify_cancel():
            heapq.heappop(self._free)
            seconds, args = self._access.begun(self._kind, args, start)
            task = _Task(start + seconds, next(_task_numbers), asked, start, future, work, args)
            heapq.heappush(self._running, task)
            self.began[-task.number] = start  # other numbers than a thread's

    def _end(self) -> None:
        task = heapq.heappop(self._running)
        heapq.heappush(self._free, task.end)
        del self.began[-task.number]
        task.future.set_result(self._clock.run(task.start, task.work, task.args))
