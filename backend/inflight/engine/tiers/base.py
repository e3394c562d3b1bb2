"""The seam between the engine and what keeps KV beyond the pool: stores of extents.  No torch.

An extent is up to `G` consecutive full KV blocks of a sequence, the first of them at a multiple of `G`.  All but the
last extent of a sequence have `G` blocks.  Its key covers all tokens up to its end, their tenant and salts: equal keys
mean equal content, for as long as model, options and program are the same.  These are the namespace, and a store is
made for one.

    engine    TierAdmission, TierWriter: what to load, and what to keep
    Tier      threads, seal, measured rate, circuit breaker: once for all stores (`tier.py`); `EngineTier` to the engine
    KVStore   bytes by key (`runner/stores/`)

A store knows nothing of KV: an extent is a row of buffers, and only their concatenation counts.  The first one is
the seal, with a checksum of everything; the others are the blocks' bytes, one or more buffers for each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from inflight.engine.deltas import TierStats

__all__ = ["EngineTier", "Fill", "Frames", "KVBlocks", "KVStore", "Read", "TornError"]

# C-contiguous buffers of bytes ("B"), in order.
Frames = Sequence[memoryview]
Read = Callable[[Frames], bool]  # writes the frames; if it is False, their contents are undefined
Fill = Callable[[Read], bool]  # `KVBlocks.fill` of some blocks


class TornError(Exception):
    """There are fewer or more bytes under a key than the extent has; it was not written to its end."""


class EngineTier(Protocol):
    """A tier as the engine's thread sees it, which never waits for a store.  Docstrings: `Tier`.

    Attributes:
        is_shared: others write to its store, too, and it cannot tell what they are about to write.
        extent_cpu_seconds: of a core that an extent usually takes to be read.
    """

    name: str
    is_shared: bool
    extent_cpu_seconds: float

    @property
    def is_open(self) -> bool: ...

    @property
    def finds_at_once(self) -> bool: ...

    def answers_within(self, seconds: float) -> bool: ...

    def seconds(self, count: int) -> float: ...

    def find(
        self, keys: Sequence[bytes], behind: Callable[[int], Sequence[bytes]] = ...
    ) -> Future[tuple[int, int | None]]: ...

    def load(self, key: bytes, fill: Fill) -> Future[bool]: ...

    def wants(self, key: bytes, is_computed: bool = True) -> bool: ...

    def store(self, key: bytes, copied: Callable[[], Frames | None]) -> None: ...

    def stats(self) -> TierStats: ...

    def close(self, seconds: float) -> None: ...


class KVStore(Protocol):
    """A medium that keeps extents: host memory, a folder, a server.

    Its methods block.  They run in threads of the tier, several at once, never in the engine's thread.  They may raise
    any exception: the tier counts it and takes it for a miss, and leaves the store alone for a while after three of
    them.  An OSError says by its errno what happened (ENOSPC: full), a TimeoutError that the medium was too slow.

    A store need not be right: it may lose, tear or change what it was given.  Its answers are verified against the
    seal.  It must not touch a buffer after the call has returned, except where `store` says so.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds; 0 if it cannot know."""

    def find(self, keys: Sequence[bytes]) -> int:
        """How many of the leading `keys` it seems to have, without reading them."""

    def first_of(self, keys: Sequence[bytes]) -> int:
        """Index of the first of `keys` that it seems to have, without reading it; `len(keys)` if it has none."""

    def load(self, key: bytes, frames: Frames) -> bool:
        """Fill the writable `frames` with what is stored under this key; False if nothing is: it may have been evicted.

        Otherwise, the contents of the buffers are undefined.

        Raises:
            TornError: it has another number of bytes, and can be dropped.
        """

    def store(self, key: bytes, frames: Frames) -> bool:
        """Keep these bytes under this key, in place of what was there; evict what was not used for longest.

        The buffers do not change any more, and the store can keep them.

        Returns:
            Whether it has them now.
        """

    def drop(self, key: bytes) -> None:
        """Remove what is stored under this key, if anything is: it was damaged."""

    def close(self) -> None:
        """Release descriptors and connections; no other method is called any more."""


class KVBlocks(Protocol):
    """The bytes of the pool's blocks, on the device: layer after layer, within a layer in the order of the blocks.

    The methods are called in any thread, and return when the device is through.
    """

    @property
    def bytes_per_block(self) -> int:
        """Of one block, in all layers."""

    def fill(self, blocks: Sequence[int], read: Read) -> bool:
        """Let `read` write the bytes of `blocks`: its answer.  If that is False, their contents are undefined."""

    def copy(self, blocks: Sequence[int]) -> memoryview:
        """The bytes of `blocks` in a buffer of their own."""

    def map_pages(self) -> None:
        """Have the system provide the pool's memory, beside the steps; returns at once."""
