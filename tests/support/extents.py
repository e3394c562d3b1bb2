"""Extents for tests of KV stores: keys, and frames that are cut as those of a pool are."""

from __future__ import annotations

import hashlib
import random

__all__ = ["blank", "content", "frames_of", "key"]


def key(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


def content(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


def frames_of(data: bytes | bytearray, count: int = 5) -> list[memoryview]:
    """`data` in `count` buffers of uneven sizes."""
    view, cuts = memoryview(data), sorted(random.Random(count).choices(range(len(data) + 1), k=count - 1))
    return [view[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)])]


def blank(size: int, count: int = 5) -> tuple[bytearray, list[memoryview]]:
    """Memory to load into, and its frames."""
    memory = bytearray(size)
    return memory, frames_of(memory, count)
