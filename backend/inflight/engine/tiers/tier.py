"""A tier: a store with the threads that use it, its seal, its measured speed, and its circuit breaker.  No torch.

The engine's thread never waits for a store.  It receives futures, which yield a miss for whatever went wrong.
"""

from __future__ import annotations

import errno
import logging
import math
import operator
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from inflight.engine.deltas import TierStats
from inflight.engine.tiers.base import Fill, Frames, KVStore, TornError
from inflight.engine.tiers.seal import SEAL_BYTES, Seal

__all__ = ["MOST_IN_HAND", "Tier", "Workers"]

_log = logging.getLogger(__name__)

_LOADERS = 2  # threads that read
MOST_IN_HAND = _LOADERS + 1  # extents that are read or copied at the same time, in as many threads
_MOST_WRITES = 4096  # that wait; more are dropped.  None has bytes yet, and one whose blocks others get is left out
_MOST_ERRORS = 3  # in a row, until the store is left alone
_OFF_SECONDS = 30.0
_STALLED_SECONDS = 1.0  # a read that takes longer: no other one is begun
_PATIENCE = 4.0  # a read that is late by a second is expected to be late by so many
_AT_ONCE_SECONDS = 1e-3
_UNMEASURED_CPU_SECONDS = 5e-4  # to read and verify an extent from the page cache
_SMOOTHING = 0.25
_RECENT = 8  # extents whose times tell what the next one takes
_FORGETS = 0.98  # of how slow answers were, with each question that is not asked
_REMEMBERED = 2**17  # keys; about 20 MB

Why = Literal["corrupt", "torn", "full", "timeout", "io"]


class Workers(Protocol):
    """Do tasks in their order, beside the engine's thread.  A task raises nothing."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Do `work(*args)`; the future has its result, and can be cancelled until it begins."""

    def offer(self, work: Callable[..., Any], *args: Any) -> bool:
        """The same without a result; False if too many tasks wait, and then it is not done."""

    def finish(self, seconds: float) -> bool:
        """Take no more offers, and end the threads; whether all tasks are done within so many seconds."""


class Tier:
    """One of the places that keep extents, as the engine's thread sees it.

    Args:
        name: in the log and in metrics.
        workers: makes so many threads of this name; so many tasks may wait, 0: any number.
        keeps: "second": an extent only when it is computed for the second time; "none": it is only read.
        clock: seconds.
        cpu_clock: seconds of a core that the calling thread has had.
        is_shared: others write to its store, too, and it cannot tell what they are about to write.

    Attributes:
        errors: why a store failed -> how often.
        load_seconds, num_loaded: of the extents that were read and verified.
        extent_cpu_seconds: that one of the last of them usually took.
        num_stored, num_dropped: extents that it took, or for which too many others waited.
        queued: keys of extents whose writes wait or run.
    """

    def __init__(
        self,
        name: str,
        store: KVStore,
        seal: Seal,
        workers: Callable[[int, str, int], Workers],
        keeps: Literal["all", "second", "none"] = "all",
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
        is_shared: bool = True,
    ) -> None:
        self.name, self.is_shared = name, is_shared
        self.errors: Counter[str] = Counter()
        self.load_seconds, self.num_loaded, self.num_stored, self.num_dropped = 0.0, 0, 0, 0
        self.extent_cpu_seconds = _UNMEASURED_CPU_SECONDS
        self._store, self._seal, self._keeps = store, seal, keeps
        self.queued: set[bytes] = set()
        self._clock, self._cpu_clock = clock, cpu_clock
        self._lock = threading.Lock()  # of what the threads count
        self._began: dict[int, float] = {}  # thread -> when the read began that it is at
        self._extent_seconds = self._find_seconds = 0.0  # measured; 0: never
        self._recent, self._recent_cpu = deque[float](maxlen=_RECENT), deque[float](maxlen=_RECENT)
        self._reads, self._writing = _Breaker(), _Breaker()  # apart: a full medium can still be read
        self._finds, self._loads = workers(1, f"{name}-find", 0), workers(_LOADERS, f"{name}-load", 0)
        self._writes = workers(1, f"{name}-write", _MOST_WRITES)
        self._asked: list[Future[tuple[int, int | None]]] = []
        self._kept: OrderedDict[bytes, bool] = OrderedDict()  # True: it has the extent; False: it was computed once

    @property
    def num_bytes(self) -> int:
        """Bytes that the store holds, as far as it knows."""
        return self._store.num_bytes

    @property
    def is_open(self) -> bool:
        """Whether to ask it: it has not failed lately, and does not hang."""
        now = self._clock()
        return now >= self._reads.off_until and self.age(now) < _STALLED_SECONDS

    @property
    def finds_at_once(self) -> bool:
        """Whether its answers are worth a moment of the engine's thread."""
        return self._find_seconds < _AT_ONCE_SECONDS and self.age(self._clock()) < _AT_ONCE_SECONDS

    def age(self, now: float) -> float:
        """Seconds that the longest read has taken that is not done."""
        began = list(self._began.values())
        return now - min(began) if began else 0.0

    def seconds(self, count: int) -> float:
        """Until `count` extents are read; what was never measured takes no time, and what hangs takes ever longer."""
        each = self._extent_seconds
        return each * -(-count // _LOADERS) + _PATIENCE * max(0.0, self.age(self._clock()) - each)

    def answers_within(self, seconds: float) -> bool:
        """Whether a question that is asked now is expected to be answered so soon, after earlier ones.

        Some dozens of refusals later it is asked again, and measured.
        """
        self._asked = [answer for answer in self._asked if not answer.done()]
        if (len(self._asked) + 1) * self._find_seconds <= seconds:
            return True
        self._find_seconds *= _FORGETS
        return False

    def stats(self) -> TierStats:
        """For metrics."""
        with self._lock:
            written = self.num_stored, self.num_dropped, dict(self.errors)
            return TierStats(self.name, self.is_open, self.num_bytes, self.load_seconds, self.num_loaded, *written)

    def find(
        self, keys: Sequence[bytes], behind: Callable[[int], Sequence[bytes]] = lambda found: ()
    ) -> Future[tuple[int, int | None]]:
        """Ask the store for extents, without reading them.

        Args:
            behind: a number of keys -> others; one of these is wanted in the place of the next key.  Called in the
                tier's thread.

        Returns:
            How many of the leading `keys` it seems to have, and the index of the first one behind them that it has.
        """
        self._asked.append(answer := self._finds.submit(self._find, list(keys), behind))
        return answer

    def load(self, key: bytes, fill: Fill) -> Future[bool]:
        """Fill blocks: whether they contain the extent, verified.  Until it is done, they are the tier's.

        Args:
            fill: see `KVBlocks`.
        """
        return self._loads.submit(self._load, key, fill)

    def wants(self, key: bytes, is_computed: bool = True) -> bool:
        """Whether to store an extent of a request, which has just computed it or found it; counts how often it was."""
        if self._keeps == "none" or self._clock() < max(self._reads.off_until, self._writing.off_until):
            return False
        kept = self._kept.get(key)
        if kept is None and self._keeps == "second" and is_computed:
            self._remember(key, False)
            return False
        return not kept and (is_computed or self._keeps == "all")

    def store(self, key: bytes, copied: Callable[[], Frames | None]) -> None:
        """Keep an extent.

        Args:
            copied: makes a copy of its bytes, in the tier's thread; None: they have changed.
        """
        if self._kept.get(key):
            return
        self._remember(key, True)
        self.queued.add(key)
        if not self._writes.offer(self._write, key, copied):
            self.forget(key)
            self.num_dropped += 1

    def forget(self, key: bytes) -> None:
        """It does not have this extent, and is not about to."""
        self.queued.discard(key)
        with self._lock:
            self._kept.pop(key, None)

    def close(self, seconds: float) -> None:
        """Finish the writes that wait, for so long at most; then close the store, unless it hangs."""
        if all([self._writes.finish(seconds), self._loads.finish(0.0), self._finds.finish(0.0)]):
            try:
                self._store.close()
            except Exception as error:
                _log.warning("KV tier %s: %s: %s", self.name, type(error).__name__, error)

    def _remember(self, key: bytes, kept: bool) -> None:
        with self._lock:
            self._kept[key] = kept
            self._kept.move_to_end(key)
            if len(self._kept) > _REMEMBERED:
                self._kept.popitem(last=False)

    def _find(self, keys: list[bytes], behind: Callable[[int], Sequence[bytes]]) -> tuple[int, int | None]:
        start, found, other = self._begin(), None, None
        others: Sequence[bytes] = ()
        try:
            found = _position(self._store.find, keys)
            others = behind(found)
            other = _position(self._store.first_of, others)
        except Exception as error:
            self._failed(error, self._reads)
        self._find_seconds += _SMOOTHING * (self._end(start) - self._find_seconds)
        if found is None:
            return 0, None
        has = [*keys[:found], *(() if other is None else others[other : other + 1])]
        lacks = [*keys[found:], *others[: other or 0]]  # perhaps: to store an extent again does no harm
        for key in has:
            self._remember(key, True)
        for key in filter(self._kept.get, lacks):
            self._remember(key, False)
        return found, other if len(has) > found else None

    def _load(self, key: bytes, fill: Fill) -> bool:
        start, cpu = self._begin(), self._cpu_clock()
        try:
            if not fill(partial(self._read, key)):
                return False
        except Exception as error:
            self.forget(key)
            self._failed(error, self._reads)
            return False
        finally:
            took = self._end(start)
        with self._lock:
            self._reads.errors_in_row = 0
            self.num_loaded += 1
            self.load_seconds += took
            self._recent.append(took)
            self._recent_cpu.append(self._cpu_clock() - cpu)
            if len(self._recent) > 1:
                self._extent_seconds = _usual(self._recent)
                self.extent_cpu_seconds = _usual(self._recent_cpu)
        return True

    def _read(self, key: bytes, frames: Frames) -> bool:
        seal = bytearray(SEAL_BYTES)
        if not self._store.load(key, [memoryview(seal), *frames]):
            self.forget(key)
            return False
        if not self._seal.is_of(seal, key, frames):
            self.forget(key)
            self._count("corrupt", "an extent was damaged, and is dropped", self._reads)
            self._store.drop(key)
            return False
        return True

    def _write(self, key: bytes, copied: Callable[[], Frames | None]) -> None:
        try:
            frames = copied()
            done = frames is not None and self._store.store(key, [memoryview(self._seal.made(key, frames)), *frames])
        except Exception as error:
            self._failed(error, self._writing)
            done = False
        self.queued.discard(key)
        if not done:
            self.forget(key)
            return
        with self._lock:
            self._writing.errors_in_row = 0
            self.num_stored += 1

    def _begin(self) -> float:
        self._began[threading.get_ident()] = start = self._clock()
        return start

    def _end(self, start: float) -> float:
        self._began.pop(threading.get_ident(), None)
        return self._clock() - start

    def _failed(self, error: Exception, breaker: _Breaker) -> None:
        self._count(_why(error), f"{type(error).__name__}: {error}", breaker)

    def _count(self, why: Why, what: str, breaker: _Breaker) -> None:
        with self._lock:
            self.errors[why] += 1
            if self.errors[why] & (self.errors[why] - 1) == 0:  # the first, the second, the fourth
                _log.warning("KV tier %s: %s (%d so far)", self.name, what, self.errors[why])
            breaker.errors_in_row += 1
            if breaker.errors_in_row >= _MOST_ERRORS:
                breaker.off_until = self._clock() + _OFF_SECONDS
                breaker.errors_in_row = _MOST_ERRORS - 1  # then one more error is enough


@dataclass
class _Breaker:
    errors_in_row: int = 0
    off_until: float = float("-inf")


def _usual(samples: Collection[float]) -> float:
    """Their mean without the largest: a thread that was stopped once, or touched new pages, says nothing of others."""
    return (math.fsum(samples) - max(samples)) / (len(samples) - 1)


def _position(ask: Callable[[Sequence[bytes]], int], keys: Sequence[bytes]) -> int:
    """The store's answer, an index of `keys` or their number."""
    return min(len(keys), max(0, operator.index(ask(keys)))) if keys else 0


def _why(error: Exception) -> Why:
    match error:
        case TornError():
            return "torn"
        case TimeoutError():
            return "timeout"
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return "full"
    return "io"
