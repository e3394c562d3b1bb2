"""The definition of a `KVStore`: a dictionary, and one that misbehaves in every way that a store may."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.engine.tiers.base import Frames, TornError


class MemoryStore:
    """Keeps copies of everything, without a limit.

    Attributes:
        extents: key -> bytes.
        asked: every key of a `find` or `load`, in order.
    """

    def __init__(self) -> None:
        self.extents: dict[bytes, bytes] = {}
        self.asked: list[bytes] = []
        self.is_closed = False

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.extents.values()))

    def find(self, keys: Sequence[bytes]) -> int:
        self.asked += keys
        return next((index for index, key in enumerate(keys) if key not in self.extents), len(keys))

    def first_of(self, keys: Sequence[bytes]) -> int:
        self.asked += keys
        return next((index for index, key in enumerate(keys) if key in self.extents), len(keys))

    def load(self, key: bytes, frames: Frames) -> bool:
        self.asked.append(key)
        stored = self.extents.get(key)
        if stored is None:
            return False
        if len(stored) != sum(frame.nbytes for frame in frames):
            raise TornError
        start = 0
        for frame in frames:
            frame[:] = stored[start : start + frame.nbytes]
            start += frame.nbytes
        return True

    def store(self, key: bytes, frames: Frames) -> bool:
        self.extents[key] = b"".join(frames)
        return True

    def drop(self, key: bytes) -> None:
        self.extents.pop(key, None)

    def close(self) -> None:
        self.is_closed = True
