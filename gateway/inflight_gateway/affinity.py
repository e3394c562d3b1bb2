"""Assigns prompt prefixes to servers: consistent hashing with bounded loads.  Pure, no I/O.

After Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2018).  Servers and keys are points
on a ring, and a key belongs to the next server on it: a server that leaves or joins moves only its own keys.  A server
with more than its share of the work is skipped, so a popular key gets several servers, always in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

from uhashring import HashRing

__all__ = ["BoundedRing", "Choice", "Why", "key_of"]

# home: the key's first server.  failover: the home is away, so the next one.  spilled: the home is full, so a later
# one.  balanced: chosen by load alone.
Why = Literal["home", "failover", "spilled", "balanced"]


class Choice(NamedTuple):
    """Index of a server, and why it was chosen."""

    server: int
    why: Why


class BoundedRing:
    """Servers on a ring.

    Args:
        names: of the servers, each once, such as `host:port`.  Rings with the same names choose the same servers.
        load_factor: a server is full with this multiple of the mean load, at least 1.  A small value balances the
            load, a large one keeps prefixes together.
        never_full: a server with fewer requests than this is never full: a batch has room for them.

    Raises:
        ValueError: no names, a duplicate name, or a load factor below 1.
    """

    def __init__(self, names: Sequence[str], load_factor: float = 1.25, never_full: int = 8) -> None:
        if not names or len(set(names)) != len(names):
            raise ValueError(f"names={list(names)!r}: at least one is expected, and each of them once")
        if not load_factor >= 1:
            raise ValueError(f"load_factor={load_factor!r}: must be at least 1, the mean load")
        self._load_factor = load_factor
        self._never_full = never_full
        self._index = {name: index for index, name in enumerate(names)}
        self._ring = HashRing(list(names), hash_fn=_hash)

    def choose(self, key: str, loads: Mapping[int, int]) -> Choice:
        """The server for a request with this key.

        Args:
            key: equal for requests with the same prefix.
            loads: index of each available server -> requests in flight; at least one entry.
        """
        home = self._index[self._ring.get_node(key)]
        limit = max(self._never_full, math.ceil(self._load_factor * (sum(loads.values()) + 1) / len(loads)))
        if loads.get(home, limit) < limit:
            return Choice(home, "home")
        there = (server for name in self._ring.iterate_nodes(key) if (server := self._index[name]) in loads)
        # The mean is below the limit, so at least one server is.
        server = next(server for server in there if loads[server] < limit)
        return Choice(server, "spilled" if home in loads else "failover")


def key_of(parts: Iterable[str]) -> str:
    """A key for several texts in this order; keys are equal only if all texts are."""
    digest = blake2b(digest_size=16)
    for part in parts:
        text = part.encode("utf-8", "surrogatepass")
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def _hash(key: str) -> int:
    """A point on the ring; MD5, the library's default, is missing on systems with FIPS."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")
