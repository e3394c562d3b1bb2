"""KV pools that tell which blocks enter and leave the prefix cache.  No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inflight.engine.kv_events.block_events import BlockEvents
from inflight.engine.kv_pool import KVPool
from inflight.engine.request import Request
from inflight.engine.tiers.tiered_pool import TieredPool

__all__ = ["RecordedPool", "RecordedTieredPool"]


class RecordedPool(KVPool):
    """Blocks that a tier has filled are told once a request uses them: only then is it known which tokens they have.

    Args:
        events: hears of the blocks.
        *sizes: of the pool that this one is.
    """

    def __init__(self, events: BlockEvents, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.events = events

    def admit(self, request: Request, prefix: Sequence[int]) -> None:
        super().admit(request, prefix)
        if prefix:
            self.events.stored(request, 0, len(prefix), self._block_of)

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        num_cached = len(self._block_of)
        full = min(num_computed_tokens, request.num_tokens) // self.block_size if request.caches_blocks else 0
        first, hash_of = full, self._hash_of
        while first and hash_of[request.block_ids[first - 1]] is None:
            first -= 1
        super().publish(request, num_computed_tokens)
        if len(self._block_of) != num_cached:
            self.events.stored(request, first, full, self._block_of)

    def _unpublish(self, block: int) -> None:
        block_hash = self._hash_of[block]
        super()._unpublish(block)
        assert block_hash is not None
        self.events.removed(block_hash)


class RecordedTieredPool(RecordedPool, TieredPool):
    """Both."""
