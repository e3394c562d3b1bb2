"""The seal of a stored extent: what it is, and a checksum over all of it.  No torch.

A store may lose, tear, mix up or change bytes, and none of that may become a token.  Every extent therefore begins with

    magic  8 bytes      namespace  16      key  16      bytes that follow  8      sum  16

where the sum covers everything but itself: XXH3-128, or with a secret BLAKE2b-128 keyed with it, which cannot be made
without the secret.  The keys of extents are derived from the hash chains of the prefix cache; with a secret they are
keyed, too, so that a name tells nothing, and a guessed prompt cannot be looked for.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Any

import xxhash

from inflight.engine.tiers.base import Frames

__all__ = ["SEAL_BYTES", "Seal"]

_MAGIC = b"INFLKV\x00\x01"
_HEAD = struct.Struct("<8s16s16sQ")
_SUM_BYTES = 16
SEAL_BYTES = _HEAD.size + _SUM_BYTES


class Seal:
    """Seals and verifies the extents of one namespace.

    Args:
        namespace: 16 bytes; see `loading/saved/identity.py`.
        secret: of all engines that share a store; b"": none.
    """

    def __init__(self, namespace: bytes, secret: bytes = b"") -> None:
        self.namespace = namespace
        self._key = blake2b(secret, person=b"seal", digest_size=32).digest() if secret else b""
        self._names = blake2b(key=blake2b(secret, person=b"names", digest_size=32).digest(), digest_size=16)

    def key_of(self, block_hash: bytes) -> bytes:
        """The key of the extent whose last block has this chain hash."""
        name = self._names.copy()
        name.update(block_hash)
        return name.digest()

    def made(self, key: bytes, payload: Frames) -> bytes:
        """The seal of an extent."""
        head = _HEAD.pack(_MAGIC, self.namespace, key, sum(frame.nbytes for frame in payload))
        return head + self._sum(head, payload)

    def is_of(self, seal: bytes | bytearray, key: bytes, payload: Frames) -> bool:
        """Whether `seal` is the one of this extent: then not one bit of either has changed."""
        return bytes(seal) == self.made(key, payload)

    def _sum(self, head: bytes, payload: Frames) -> bytes:
        state: Any = blake2b(key=self._key, digest_size=_SUM_BYTES) if self._key else xxhash.xxh3_128()
        state.update(head)
        for frame in payload:
            state.update(frame)
        return bytes(state.digest())
