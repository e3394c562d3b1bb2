"""The invariants of the engine's state (docs/architecture.md), asserted after each step of the tests.  No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from inflight.engine.kv_pool import KVPool
from inflight.engine.request import Request, Status

if TYPE_CHECKING:
    from inflight.engine.core import EngineCore
    from inflight.engine.drafting.draft_model import DraftModel
    from inflight.engine.scheduler import Scheduler

__all__ = ["check_core", "check_draft_model", "check_pool", "check_scheduler"]


def check_core(core: EngineCore) -> None:
    """Assert that every live sequence is counted once; when idle, that every block came back."""
    check_scheduler(core.scheduler)
    live = [request for of_one in core._live.values() for request in of_one if request.status is not Status.FINISHED]
    assert core.limits.num_live == len(live), "a sequence that arrived or ended is not counted"
    if not core.has_work:
        assert not core._live, "the core remembers a request that no queue holds"
        assert core.pool.num_used == 0, "an idle engine owns blocks"
        assert core.scheduler.swap.num_used == 0, "an idle engine holds host blocks"


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert that every request, slot and block is where the request's status puts it (invariants 1 to 3)."""
    queued = [*scheduler.waiting, *scheduler.held]
    live = [*scheduler.running, *queued]
    assert len(set(map(id, live))) == len(live), "a request is in two places"
    assert all(r.status is Status.RUNNING and r.slot >= 0 for r in scheduler.running)
    assert all(r.status is Status.WAITING and r.slot < 0 and not r.block_ids for r in queued)
    assert len(scheduler.held) <= scheduler.held.limit, "more requests are held than the limit allows"
    slots = [*scheduler._free_slots, *(r.slot for r in scheduler.running)]
    assert sorted(slots) == list(range(scheduler.limits.max_num_seqs)), "a slot is lost or held twice"
    check_pool(scheduler.pool, scheduler.running)
    scheduler.swap.check_integrity(queued)


def check_draft_model(model: DraftModel) -> None:
    """Assert that each slot and block is in exactly one place."""
    rows = model._rows.values()
    slots = [*model._free_slots, *(row.slot for row in rows)]
    assert sorted(slots) == list(range(len(slots))) == list(range(model.max_num_seqs)), "a slot is lost or held twice"
    check_pool(model.pool, [row.kv for row in rows])


def check_pool(pool: KVPool, requests: Iterable[Request]) -> None:
    """Assert invariants 1 and 2 against the block tables of all live requests.

    Raises:
        AssertionError: naming the first block that is lost, held twice or miscounted.
    """
    tables: Counter[int] = Counter()
    for request in requests:
        assert len(set(request.block_ids)) == len(request.block_ids), "a block table names a block twice"
        outside = [block for block in request.block_ids if not 0 <= block < pool.num_blocks]
        assert not outside, f"a block table names {outside}, and the pool has {pool.num_blocks} blocks"
        tables.update(request.block_ids)
        room = len(request.block_ids) * pool.block_size
        assert request.num_computable_tokens == min(room, request.max_total_tokens - 1), "its room is miscounted"
        for block in request.block_ids[request.num_computed_tokens // pool.block_size :]:
            assert pool._ref[block] == 1, f"block {block} is written to and shared"
    assert pool.num_references == tables.total(), "block tables are miscounted"
    counted = [0] * pool.num_blocks
    for block, count in tables.items():
        counted[block] = count
    if pool._ref != counted:
        block = next(block for block in range(pool.num_blocks) if pool._ref[block] != counted[block])
        raise AssertionError(f"block {block}: {pool._ref[block]} != {counted[block]} tables")
    unowned = [*pool._free, *pool._cached]
    owned = [block for block, count in enumerate(pool._ref) if count]
    assert sorted([*unowned, *owned, *pool.reserved]) == list(range(pool.num_blocks)), (
        "a block is lost or in two places"
    )
    assert {None}.issuperset(map(pool._hash_of.__getitem__, pool._free)), "a free block is in the prefix cache"
    for block_hash, block in pool._block_of.items():
        assert pool._hash_of[block] == block_hash, f"block {block} is found under another hash"
    assert len(pool._block_of) == pool.num_blocks - pool._hash_of.count(None)
