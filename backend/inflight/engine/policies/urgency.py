"""Lets waiting requests take the place of running ones that they outrank.  Pure Python, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from inflight.engine.kv_pool import KVPool
from inflight.engine.policies.base import AdmissionPolicy, BudgetPolicy, OrderPolicy
from inflight.engine.request import Request

__all__ = ["OutrankingFirst"]

_LOOK_AHEAD = 16  # waiting requests considered in a step


class OutrankingFirst:
    """Implements `UrgencyPolicy`: requests that the order ranks above running ones, which give way if that suffices.

    Args:
        order: decides which requests outrank which.
        admission: decides whether there is room.
        budget: decides how many tokens they get.
    """

    def __init__(self, order: OrderPolicy, admission: AdmissionPolicy, budget: BudgetPolicy) -> None:
        self._order = order
        self._admission = admission
        self.grant = budget.grant

    def next_requests(self, running: Sequence[Request]) -> Iterator[Request]:
        """Up to the first that outranks no running request."""
        first = self._order.next_requests(1)
        if not first or next(self._order.outranked(first[0], running), None) is None:
            return  # the usual case, quickly recognised
        for request in self._order.next_requests(_LOOK_AHEAD):
            if next(self._order.outranked(request, running), None) is None:
                return
            yield request

    def giving_way(
        self,
        request: Request,
        prefix: Sequence[int],
        beside: Sequence[Request],
        running: Sequence[Request],
        pool: KVPool,
    ) -> Sequence[Request]:
        """One victim, if its blocks are enough, which is usual; else all.  Any victim frees a slot."""
        victims = list(self._order.outranked(request, running))
        for enough in (victims[:1], victims):
            if self._admission.admits(request, prefix, beside, _PoolWithout(pool, enough)) is True:
                return enough
        return ()


class _PoolWithout(KVPool):
    """A read-only view of the pool for admission, as if `victims` had given up their blocks."""

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
