"""How long requests with a draft model can be: remembered, so that only a first start asks transformers.

Kept beside kept weights, by the same keys: of both checkpoints, with their options, and of this program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec
import xxhash

from inflight.config import EngineConfig
from inflight.loading.load_errors import CannotKeep
from inflight.loading.startup import place_of

__all__ = ["agreed_length"]


class _Note(msgspec.Struct):
    """
    Attributes:
        length: in tokens.
        check: XXH3-64 of the note's name and the length.
    """

    length: int
    check: int


def agreed_length(target: EngineConfig, draft: EngineConfig, read: Callable[[], int]) -> int:
    """The result of `read`, or of an earlier start for these checkpoints and options.

    Args:
        read: raises ConfigError or LoadError, which is not remembered.
    """
    try:
        cache, key = place_of(target)
        together = f"{key} {place_of(draft)[1]}"
    except CannotKeep:
        return read()
    name = f"{hashlib.blake2b(together.encode(), digest_size=16).hexdigest()}.length"
    try:
        note = msgspec.msgpack.decode(cache.read_note(name), type=_Note)
        if note.check == _check(name, note.length):
            return note.length
    except (msgspec.MsgspecError, OSError):
        pass
    length = read()
    cache.write_note(name, msgspec.msgpack.encode(_Note(length, _check(name, length))))
    return length


def _check(name: str, length: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{name} {length}".encode())
