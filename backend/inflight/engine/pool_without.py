"""Whether preempting is worth it: the KV pool as it would be without some of the running requests.  No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from inflight.engine.kv_pool import KVPool
from inflight.engine.request import Request

__all__ = ["PoolWithout"]


class PoolWithout(KVPool):
    """What admission may ask of a pool, answered as if `victims` had given up their blocks.  Nothing may change it."""

    def __init__(self, pool: KVPool, victims: Sequence[Request]) -> None:
        self.num_blocks, self.block_size = pool.num_blocks, pool.block_size
        references = Counter(block for request in victims for block in request.block_ids)
        self._pool = pool
        self._freed = {block for block, count in references.items() if pool._ref[block] == count}
        self.num_references = pool.num_references - references.total()

    @property
    def num_available(self) -> int:
        return self._pool.num_available + len(self._freed)

    def num_reclaimed(self, prefix: Sequence[int]) -> int:
        return self._pool.num_reclaimed(prefix) + len(self._freed.intersection(prefix))
