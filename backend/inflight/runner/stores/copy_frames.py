"""Bytes from one row of buffers to another."""

from __future__ import annotations

from inflight.engine.tiers.base import Frames

__all__ = ["copy_frames"]


def copy_frames(source: Frames, target: Frames) -> None:
    """Fill `target` with the first bytes of `source`, which has at least as many, perhaps cut at other places."""
    rest = memoryview(b"")
    parts = iter(source)
    for buffer in target:
        while buffer.nbytes:
            while not rest.nbytes:
                rest = next(parts)
            count = min(rest.nbytes, buffer.nbytes)
            buffer[:count] = rest[:count]
            rest, buffer = rest[count:], buffer[count:]
