"""Loads of extents into the pool: reserved, filled by a tier, verified, adopted.  No torch.

All of this runs in the engine's thread, between steps; a tier's threads only fill the blocks.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from inflight.engine.events import DoneStep, EngineListener
from inflight.engine.request import Request
from inflight.engine.step import SchedulerOutput
from inflight.engine.tiers.base import EngineTier
from inflight.engine.tiers.tiered_pool import TieredPool
from inflight.engine.tiers.tiers import ExtentLoad, Tiers

__all__ = ["Loads"]

_MOST_IN_FLIGHT = 64  # extents
_SHARE = 0.06  # of the time beside running requests in which a tier's threads may use a core
_MOST_SHARE = 0.5  # the same if they must hurry
_IN_TIME = 1.25  # they come so much sooner than they must
_MOST_EARNED = 5e-3  # CPU seconds of a step, at the usual share: the next one may be short
_RECENT = 8  # steps that tell how long a CPU second takes


class Loads(EngineListener):
    """Beside running requests, loads begin at the pace at which they lengthen steps by a tenth, or less.

    A CPU computes a step on all of its cores, so each moment of a tier's thread makes one late.  A step is counted with
    the CPU time that it had at most: others may have delayed it.  A GPU needs no pace: its steps share the bus alone.
    Loads that would come too late at that pace hurry: to compute the same would hold up others far longer.

    A block is free as soon as its request ends, and steps in flight may still write it: a load begins when all steps
    are done that were made before its blocks were reserved.  The next step may copy out blocks of preempted requests:
    after a preemption none are reserved until it is made.

    Args:
        tiers: their loads that have begun, perhaps for an earlier core, are adopted into `pool`.
        pool: has the blocks of these loads reserved.

    Attributes:
        num_lost: loads so far that yielded nothing.
    """

    def __init__(self, tiers: Tiers, pool: TieredPool, clock: Callable[[], float] = time.monotonic) -> None:
        self.tiers, self.pool, self.clock, self.num_lost = tiers, pool, clock, 0
        self._began = clock(), tiers.cpu_clock()  # the step that is made
        self._is_beside = False  # running requests
        self._left = math.inf  # CPU seconds that loads may still take in it
        self._recent = deque[tuple[float, float]](maxlen=_RECENT)  # steps beside requests: seconds, those with a core
        self._pace = 1.0  # seconds of such steps for each one with a core
        self._share = _SHARE  # of a core that loads get in this step
        self._wanted: dict[bytes, int] = {}  # in this step: last hash of the first -> extents that have no load yet
        self._num_made = self._num_done = 0  # steps
        self._reserved: deque[tuple[int, ExtentLoad]] = deque()  # they begin when so many steps are done
        self._preempted: set[Request] = set()  # since the last step was made
        for load in tiers.loads.values():  # an earlier core's requests do not wait any more
            load.done.cancel()

    def start(
        self, tier: EngineTier, chain: Sequence[bytes], first: int, count: int, keep: Sequence[int]
    ) -> ExtentLoad | None:
        """Load an extent, or join the load that is in flight for it; call `leave` with the result in the end.

        Args:
            chain: hashes of the sequence's blocks; the extent's are `count`, from index `first` on.
            keep: cached blocks of the sequence, which are not evicted for it.

        Returns:
            None if none may begin now, or too many are in flight.
        """
        load = self.tiers.loads.get(chain[first + count - 1])
        if load is None:
            may_begin = self._left > 0 and not self._preempted and len(self.tiers.loads) < _MOST_IN_FLIGHT
            blocks = self.pool.reserve(count, keep) if may_begin else None
            if blocks is None:
                return None
            load = self.tiers.loads[chain[first + count - 1]] = ExtentLoad(chain, first, blocks, tier)
            if self._num_made == self._num_done:
                self.tiers.begin(load)
            else:
                self._reserved.append((self._num_made, load))
            self._left -= tier.extent_cpu_seconds
        load.num_waiting += 1
        return load

    def leave(self, load: ExtentLoad) -> None:
        """A request waits no longer for it.  If it has not begun, and no other one waits, it never does."""
        load.num_waiting -= 1
        if not load.num_waiting and load.is_adopted is None and load.done.cancel():
            self._end(load)

    def step_begins(self, running: Sequence[Request]) -> None:
        """Adopt what has arrived, and free the blocks of what has not."""
        now = self.clock(), self.tiers.cpu_clock()
        took = now[0] - self._began[0]
        had = min(took, now[1] - self._began[1], _MOST_EARNED / _SHARE)  # seconds with a core
        earned, self._share = self._share * had, _SHARE
        if running:
            self._recent.append((took, had))
            self._pace = _usual_pace(self._recent)
        self._is_beside = bool(running)
        is_paced = self._is_beside and self.tiers.on_cores
        self._began, self._left = now, (earned if is_paced else math.inf) + min(self._left, 0.0)
        self._wanted.clear()
        ended = [load for load in self.tiers.loads.values() if load.done.done()]
        for load in ended:
            self._end(load)
        for load in {id(load.chain): load for load in ended}.values():  # of each sequence the last
            if self.pool.num_available < 4 * load.first:  # else its head is not evicted while it is loaded
                self.pool.touch(self.pool.cached(load.chain[: load.first + len(load.blocks)]))

    def arrived(self, sequences: Sequence[Request]) -> None:
        self.tiers.blocks.map_pages()

    def left(self, request: Request) -> None:
        self._preempted.add(request)

    def ended(self, request: Request) -> None:
        self._preempted.discard(request)  # it was not

    def step_made(self, out: SchedulerOutput) -> None:
        self._num_made += 1
        self._preempted.clear()

    def step_done(self, step: DoneStep) -> None:
        self._num_done += 1
        while self._reserved and self._reserved[0][0] <= self._num_done:
            _, load = self._reserved.popleft()
            if load.is_adopted is None:  # else no request waits for it
                self.tiers.begin(load)

    step_failed = step_done

    def come_within(self, seconds: float, tier: EngineTier, block_hash: bytes, count: int) -> bool:
        """Whether `count` more extents, the first with this last hash, come so soon; then others' come after them."""
        same = self._wanted.get(block_hash, 0)  # what begins with the same extent is mostly the same
        wanted = sum(self._wanted.values()) + max(0, count - same) if count else 0
        ahead = sum(load.tier is tier for load in self.tiers.loads.values())
        owed = wanted * tier.extent_cpu_seconds - self._left if count else 0.0  # what has begun waits for no pace
        takes = max(0.0, owed) * self._pace  # with a core
        begin_later = self._left <= 0 or (self._is_beside and self._preempted)
        if not (self.tiers.loads or begin_later) or max(takes / _MOST_SHARE, tier.seconds(ahead + wanted)) >= seconds:
            return False
        self._share = max(self._share, min(_MOST_SHARE, _IN_TIME * takes / seconds))
        self._wanted[block_hash] = max(count, same)
        return True

    def _end(self, load: ExtentLoad) -> None:
        hashes = load.chain[load.first : load.first + len(load.blocks)]
        del self.tiers.loads[hashes[-1]]
        load.is_adopted = not load.done.cancelled() and load.done.result()
        if not load.is_adopted:
            self.num_lost += 1
            self.pool.unreserve(load.blocks)
            return
        self.tiers.num_hits += self.pool.adopt(load.blocks, hashes) * self.pool.block_size


def _usual_pace(steps: Iterable[tuple[float, float]]) -> float:
    """Seconds for each one with a core, without the longest step: it may be late for reasons of its own."""
    took, had = (math.fsum(each) for each in zip((0.0, 0.0), *sorted(steps)[:-1]))
    return took / had if had else 1.0
