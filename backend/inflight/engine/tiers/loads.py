"""Loads of extents into the pool: reserved, filled by a tier, verified, adopted.  No torch.

All of this runs in the engine's thread, between steps; a tier's threads only fill the blocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from inflight.engine.tiers.tier import Tier
from inflight.engine.tiers.tiered_pool import TieredPool
from inflight.engine.tiers.tiers import ExtentLoad, Tiers

__all__ = ["Loads"]

_MOST_IN_FLIGHT = 64  # extents
_SHARE = 0.1  # of the time beside running requests in which a tier's threads may use a core


class Loads:
    """Beside running requests, loads begin at the pace at which they lengthen steps by a tenth, or less.

    A CPU computes a step on all of its cores, so each moment of a tier's thread makes one of them late.  A step is
    counted with the CPU time that it had at most: other processes may have delayed it.

    Args:
        tiers: their loads in flight, perhaps of an earlier core, are adopted into `pool`.
        pool: has the blocks of these loads reserved.

    Attributes:
        num_lost: loads so far that yielded nothing.
    """

    def __init__(self, tiers: Tiers, pool: TieredPool, clock: Callable[[], float] = time.monotonic) -> None:
        self.tiers = tiers
        self.pool = pool
        self.clock = clock
        self.num_lost = 0
        self._began = clock(), tiers.cpu_clock()  # the step that is made
        self._left = math.inf  # CPU seconds that loads may still take in it

    @property
    def are_possible(self) -> bool:
        """Whether the pool ever lends as many blocks as an extent has."""
        return self.pool.most_reserved >= self.tiers.extent_blocks

    @property
    def are_coming(self) -> bool:
        """Whether any is in flight, or may begin in a later step only."""
        return bool(self.tiers.loads) or self._left <= 0

    def start(
        self, tier: Tier, chain: Sequence[bytes], first: int, count: int, keep: Sequence[int]
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
            blocks = None
            if self._left > 0 and len(self.tiers.loads) < _MOST_IN_FLIGHT:
                blocks = self.pool.reserve(count, keep)
            if blocks is None:
                return None
            load = self.tiers.load(tier, chain, first, blocks)
            self._left -= tier.extent_cpu_seconds
        load.num_waiting += 1
        return load

    def leave(self, load: ExtentLoad) -> None:
        """A request waits no longer for it.  If it has not begun, and no other one waits, it never does."""
        load.num_waiting -= 1
        if not load.num_waiting and load.is_adopted is None and load.done.cancel():
            self._end(load)

    def step_begins(self, is_alone: bool) -> None:
        """Adopt what has arrived, and free the blocks of what has not.

        Args:
            is_alone: no request runs.
        """
        now = self.clock(), self.tiers.cpu_clock()
        earned = math.inf if is_alone else _SHARE * min(now[0] - self._began[0], now[1] - self._began[1])
        self._began, self._left = now, earned + min(self._left, 0.0)
        if self.tiers.loads:
            self._adopt_done()

    def _adopt_done(self) -> None:
        ended = [load for load in self.tiers.loads.values() if load.done.done()]
        for load in ended:
            self._end(load)
        chains = {id(load.chain): load for load in ended}  # of each sequence the last
        for load in chains.values():
            self.pool.touch(self.pool.cached(load.chain[: load.first + len(load.blocks)]))

    def seconds(self, tier: Tier, count: int) -> float:
        """Until `count` more extents are there, after those in flight."""
        ahead = sum(load.tier is tier for load in self.tiers.loads.values())
        paced = 0.0 if self._left == math.inf else (count * tier.extent_cpu_seconds - self._left) / _SHARE
        return max(paced, tier.seconds(ahead + count))

    def _end(self, load: ExtentLoad) -> None:
        hashes = load.chain[load.first : load.first + len(load.blocks)]
        del self.tiers.loads[hashes[-1]]
        load.is_adopted = not load.done.cancelled() and load.done.result()
        if not load.is_adopted:
            self.num_lost += 1
            self.pool.unreserve(load.blocks)
            return
        self.tiers.num_hits += self.pool.adopt(load.blocks, hashes) * self.pool.block_size
