"""Loads of extents into the pool: reserved, filled by a tier, verified, adopted.  No torch.

All of this runs in the engine's thread, between steps; a tier's threads only fill the blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from inflight.engine.tiers.tier import Tier
from inflight.engine.tiers.tiered_pool import TieredPool
from inflight.engine.tiers.tiers import ExtentLoad, Tiers

__all__ = ["Loads"]

_MOST_IN_FLIGHT = 64  # extents


class Loads:
    """
    Args:
        tiers: their loads in flight, perhaps of an earlier core, are adopted into `pool`.
        pool: has the blocks of these loads reserved.
    """

    def __init__(self, tiers: Tiers, pool: TieredPool, clock: Callable[[], float] = time.monotonic) -> None:
        self.tiers = tiers
        self.pool = pool
        self.clock = clock

    @property
    def are_possible(self) -> bool:
        """Whether the pool ever lends as many blocks as an extent has."""
        return self.pool.most_reserved >= self.tiers.extent_blocks

    def start(
        self, tier: Tier, chain: Sequence[bytes], first: int, count: int, keep: Sequence[int]
    ) -> ExtentLoad | None:
        """Load an extent, or join the load that is in flight for it; call `leave` with the result in the end.

        Args:
            chain: hashes of the sequence's blocks; the extent's are `count`, from index `first` on.
            keep: cached blocks of the sequence, which are not evicted for it.

        Returns:
            None if too many are in flight.
        """
        load = self.tiers.loads.get(chain[first + count - 1])
        if load is None:
            blocks = None
            if len(self.tiers.loads) < _MOST_IN_FLIGHT:
                blocks = self.pool.reserve(count, keep)
            if blocks is None:
                return None
            load = self.tiers.load(tier, chain, first, blocks)
        load.num_waiting += 1
        return load

    def leave(self, load: ExtentLoad) -> None:
        """A request waits no longer for it.  If it has not begun, and no other one waits, it never does."""
        load.num_waiting -= 1
        if not load.num_waiting and load.is_adopted is None and load.done.cancel():
            self._end(load)

    def poll(self) -> None:
        """Adopt what has arrived, and free the blocks of what has not."""
        ended = [load for load in self.tiers.loads.values() if load.done.done()]
        for load in ended:
            self._end(load)
        chains = {id(load.chain): load for load in ended}  # of each sequence the last
        for load in chains.values():
            self.pool.touch(self.pool.cached(load.chain[: load.first + len(load.blocks)]))

    def seconds(self, tier: Tier, count: int) -> float:
        """Until `count` more extents are there, after those in flight."""
        ahead = sum(load.tier is tier for load in self.tiers.loads.values())
        return tier.seconds(ahead + count)

    def _end(self, load: ExtentLoad) -> None:
        hashes = load.chain[load.first : load.first + len(load.blocks)]
        del self.tiers.loads[hashes[-1]]
        load.is_adopted = not load.done.cancelled() and load.done.result()
        if not load.is_adopted:
            self.pool.unreserve(load.blocks)
            return
        self.tiers.num_hits += self.pool.adopt(load.blocks, hashes) * self.pool.block_size
