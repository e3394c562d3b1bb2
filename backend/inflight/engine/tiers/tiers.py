"""The tiers of an engine, the fastest first, and what all of them share.  No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from weakref import ref

from inflight.engine.deltas import TierTotals
from inflight.engine.tiers.base import EngineTier, Frames, KVBlocks
from inflight.engine.tiers.seal import Seal

__all__ = ["ExtentLoad", "Tiers", "blocks_of_extent"]

_EXTENT_BYTES = 2**20
_GPU_EXTENT_BYTES = 2**23  # each takes a launch for every layer's keys and values
_MOST_BLOCKS = 16  # of an extent
_SHORTEST_PART = 4  # is 1 / 4 of an extent


def blocks_of_extent(bytes_per_block: int, on_cores: bool) -> int:
    """As many as are a mebibyte, or eight on a GPU; from 1 to 16."""
    return min(_MOST_BLOCKS, max(1, (_EXTENT_BYTES if on_cores else _GPU_EXTENT_BYTES) // bytes_per_block))


@dataclass(eq=False)
class ExtentLoad:
    """An extent on its way into reserved blocks.

    Attributes:
        chain: hashes of the sequence's blocks; the extent begins at index `first`.
        blocks: reserved for it.
        done: whether `blocks` contain it now, verified; its own future until `Tiers.begin`.
        num_waiting: requests that wait for it.
        is_adopted: its blocks are in the prefix cache, or were; None: it is on its way.
    """

    chain: Sequence[bytes]
    first: int
    blocks: list[int]
    tier: EngineTier
    done: Future[bool] = field(default_factory=Future)
    num_waiting: int = 0
    is_adopted: bool | None = None


@dataclass
class Tiers:
    """Belongs to the runner, whose blocks they fill: loads can outlive an engine core.

    Attributes:
        tiers: in the order in which they are asked.
        blocks: of the device's pool.
        seal: of the namespace.
        extent_blocks: blocks of an extent.
        cpu_clock: seconds of all cores that this process has had.
        on_cores: whether steps compute on the cores that the tiers' threads need, too.
        loads: in flight, by the hash of the extent's last block.
        coming: whether this tier gets the extent of this key once no step in flight writes it; for any thread.
        closing: is called first when they are closed.
        num_queries, num_hits: tokens that the prefix cache lacked and were looked for, and adopted tokens.
        num_pools: pools that were made over `blocks`, one after the other.  A write that waits for an earlier one is
            left out: its generations no longer tell that a block has changed.
    """

    tiers: Sequence[EngineTier]
    blocks: KVBlocks
    seal: Seal
    cpu_clock: Callable[[], float] = time.process_time
    on_cores: bool = True
    loads: dict[bytes, ExtentLoad] = field(default_factory=dict)
    coming: Callable[[EngineTier, bytes], bool] = lambda tier, key: False
    closing: Callable[[], object] = list
    num_queries: int = 0
    num_hits: int = 0
    num_pools: int = 0
    extent_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        self.extent_blocks = blocks_of_extent(self.blocks.bytes_per_block, self.on_cores)

    @property
    def part_blocks(self) -> int:
        """Blocks of the shortest part of an extent that is kept: a file for less is not worth its place."""
        return max(1, self.extent_blocks // _SHORTEST_PART)

    @property
    def reserved(self) -> list[int]:
        """The blocks that loads fill."""
        return [block for load in self.loads.values() for block in load.blocks]

    def totals(self) -> TierTotals:
        """For metrics."""
        return TierTotals(self.num_queries, self.num_hits, [tier.stats() for tier in self.tiers])

    def begin(self, load: ExtentLoad) -> None:
        """Start to fill its blocks."""
        key = self.seal.key_of(load.chain[load.first + len(load.blocks) - 1])
        load.done = load.tier.load(key, partial(self.blocks.fill, load.blocks))

    def missing_in(self, key: bytes, is_computed: bool) -> list[EngineTier]:
        """The tiers that should get this extent of a request, which has just computed it or found it."""
        return [tier for tier in self.tiers if tier.wants(key, is_computed)]

    def store(self, into: Sequence[EngineTier], key: bytes, blocks: Sequence[int], generations: list[int]) -> None:
        """Keep a full extent that no step in flight writes.

        Args:
            generations: the pool's, live: a block whose number changes until its bytes are copied is left out.
        """
        expected, pool = [generations[block] for block in blocks], self.num_pools
        lock, last = threading.Lock(), list[ref[memoryview]]()

        def is_same() -> bool:
            return pool == self.num_pools and [generations[block] for block in blocks] == expected

        def copied() -> Frames | None:
            with lock:  # a tier takes the copy that another one still writes or keeps
                copy = last.pop()() if last else None
                if copy is None:
                    copy = self.blocks.copy(blocks) if is_same() else None
                    if copy is None or not is_same():
                        return None
                last.append(ref(copy))
            return [copy]

        for tier in into:
            tier.store(key, copied)

    def close(self, seconds: float = 5.0) -> None:
        """Finish the writes, for so long at most, and close the stores; the engine has ended."""
        self.closing()
        until = time.monotonic() + seconds
        for tier in self.tiers:
            tier.close(max(0.0, until - time.monotonic()))
