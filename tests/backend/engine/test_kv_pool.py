"""Examples of pool behaviour; test_scheduler_properties.py checks its invariants."""

from __future__ import annotations

import pytest

from inflight.engine.integrity import check_pool
from inflight.engine.kv_pool import KVPool
from inflight.engine.request import Request
from inflight.engine.sampling_params import SamplingParams


def request(tokens: list[int], **changes) -> Request:
    return Request(1, tokens, SamplingParams(), **changes)


def fill(pool: KVPool, req: Request) -> Request:
    """Admit, compute and publish a whole prompt."""
    pool.admit(req, pool.find_prefix(req))
    assert pool.extend(req, req.num_tokens) is not None
    req.num_computed_tokens = req.num_tokens
    pool.publish(req, req.num_tokens)
    return req


def test_extend_is_all_or_nothing():
    pool = KVPool(4, 4)
    first = request([1] * 12)
    pool.admit(first, [])
    assert len(pool.extend(first, 12)) == 3
    second = request([2] * 8)
    pool.admit(second, [])
    assert pool.extend(second, 8) is None
    assert second.block_ids == []
    assert pool.num_available == 1
    check_pool(pool, [first, second])


def test_a_hit_leaves_a_token_to_compute():
    pool = KVPool(8, 4)
    tokens = list(range(8))
    fill(pool, request(tokens))
    assert len(pool.find_prefix(request(tokens))) == 1, "the last block's logits are needed"
    assert len(pool.find_prefix(request([*tokens, 9]))) == 2


def test_hashes_cover_everything_before_a_block():
    pool = KVPool(8, 4)
    fill(pool, request([1, 1, 1, 1, 2, 2, 2, 2, 3]))
    assert pool.find_prefix(request([9, 1, 1, 1, 2, 2, 2, 2, 3])) == []


def test_eviction_takes_the_least_recently_used_prefix_and_its_tail_first():
    pool = KVPool(4, 4)
    old = fill(pool, request([1] * 8))
    new = fill(pool, request([2] * 8))
    pool.release(old)
    pool.release(new)
    taker = request([3] * 4)
    pool.admit(taker, [])
    pool.extend(taker, 4)
    assert len(pool.find_prefix(request([1] * 9))) == 1, "the older prefix lost its tail and kept its head"
    assert len(pool.find_prefix(request([2] * 9))) == 2
    check_pool(pool, [taker])


def test_blocks_in_use_are_shared_and_survive_their_first_owner():
    pool = KVPool(8, 4)
    first = fill(pool, request([1] * 9))
    second = request([1] * 9)
    pool.admit(second, pool.find_prefix(second))
    pool.extend(second, 9)
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.num_computed_tokens == 8
    pool.release(first)
    check_pool(pool, [second])
    assert pool.num_used == 3


def test_equal_blocks_computed_at_the_same_time_are_published_once():
    pool = KVPool(8, 4)
    requests = [request([1] * 8), request([1] * 8)]
    for each in requests:
        pool.admit(each, [])
        pool.extend(each, 8)
        each.num_computed_tokens = 8
    for each in requests:
        pool.publish(each, 8)
    check_pool(pool, requests)
    for each in requests:
        pool.release(each)
    check_pool(pool, [])
    assert pool.num_available == 8


def test_another_salt_and_uncached_requests_find_no_prefix():
    pool = KVPool(8, 4)
    fill(pool, request([1] * 9))
    assert pool.find_prefix(request([1] * 9, cache_salts=("b",))) == []
    assert pool.find_prefix(request([1] * 9, caches_blocks=False)) == []


def test_integrity_notices_a_stolen_block():
    pool = KVPool(4, 4)
    victim = fill(pool, request([1] * 8))
    thief = request([2] * 4)
    thief.block_ids = [victim.block_ids[0]]
    with pytest.raises(AssertionError):
        check_pool(pool, [victim, thief])


@pytest.mark.parametrize("block", [-1, 4])
def test_integrity_notices_a_block_that_the_pool_lacks(block: int):
    """-1 would count as the last block."""
    pool = KVPool(4, 4)
    victim = request([1] * 16)
    pool.admit(victim, [])
    pool.extend(victim, 16)
    check_pool(pool, [victim])
    victim.block_ids[victim.block_ids.index(3)] = block
    with pytest.raises(AssertionError, match=f"names \\[{block}\\], and the pool has 4 blocks"):
        check_pool(pool, [victim])
