"""A KV store in this process's memory: it outlives the pool's blocks, not the engine.  No torch."""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from inflight.engine.tiers.base import Frames, TornError
from inflight.runner.stores.copy_frames import copy_frames

__all__ = ["HostStore"]


class HostStore:
    """Implements `KVStore`.

    Args:
        max_bytes: of all extents; those not used for longest go first.

    Attributes:
        evicted: called with the key of each extent that has to go, in the thread that stores another.
    """

    def __init__(self, max_bytes: int) -> None:
        self.evicted: Callable[[bytes], None] = lambda key: None
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._extents: OrderedDict[bytes, Frames] = OrderedDict()  # the one not used for longest first

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def find(self, keys: Sequence[bytes]) -> int:
        extents = self._extents
        return next((index for index, key in enumerate(keys) if key not in extents), len(keys))

    def first_of(self, keys: Sequence[bytes]) -> int:
        extents = self._extents
        return next((index for index, key in enumerate(keys) if key in extents), len(keys))

    def kept(self, key: bytes) -> Frames | None:
        """The buffers of an extent, which do not change; their memory is in use for as long as the caller has them."""
        with self._lock:
            if key in self._extents:
                self._extents.move_to_end(key)
            return self._extents.get(key)

    def load(self, key: bytes, frames: Frames) -> bool:
        kept = self.kept(key)
        if kept is None:
            return False
        if _size(kept) != _size(frames):
            raise TornError(f"{_size(kept)} bytes are kept, and {_size(frames)} were expected")
        copy_frames(kept, frames)
        return True

    def store(self, key: bytes, frames: Frames) -> bool:
        size = _size(frames)
        if size > self._max_bytes:
            raise OSError(errno.ENOSPC, f"an extent has {size} bytes, and the tier's size is {self._max_bytes}")
        with self._lock:
            self._drop(key)
            while self._num_bytes + size > self._max_bytes:
                self._drop(oldest := next(iter(self._extents)))
                self.evicted(oldest)
            self._extents[key] = frames
            self._num_bytes += size
        return True

    def drop(self, key: bytes) -> None:
        with self._lock:
            self._drop(key)

    def close(self) -> None:
        with self._lock:
            self._extents.clear()
            self._num_bytes = 0

    def _drop(self, key: bytes) -> None:
        """The caller has the lock."""
        if key in self._extents:
            self._num_bytes -= _size(self._extents.pop(key))


def _size(frames: Frames) -> int:
    return sum([frame.nbytes for frame in frames])
