"""Subscribers know the blocks of the prefix cache, whatever happens to requests, blocks and batches."""

from __future__ import annotations

from drafters import KINDS, HashDrafter
from engine_rig import Info, add, collect, make_core
from hypothesis import given
from hypothesis import strategies as st
from kv_events_rig import Arrived, DirectSink, Subscriber, events_of, last_number, number, numbers, recorded
from tiers_rig import FAULTS, FaultyStore, TieredRig

from inflight.engine.adapter import AdapterRef
from inflight.engine.attached import Attached
from inflight.engine.kv_events.block_events import BlockEvents
from inflight.engine.kv_events.recorded_pool import RecordedPool
from inflight.engine.request import Request
from inflight.engine.sampling_params import SamplingParams

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=40)  # few distinct ids: prefixes collide often
arrivals = st.lists(
    st.tuples(
        st.integers(0, 5),  # steps before it arrives
        prompts,
        st.integers(1, 20),  # max_tokens
        st.sampled_from([1, 1, 3]),  # n
        st.one_of(st.none(), st.integers(0, 10)),  # steps until it is aborted
        st.sampled_from([{}, {}, {}, {"tenant": "b"}, {"cache_salt": "s"}]),
    ),
    min_size=1,
    max_size=10,
)
engine_options = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4, 8]),
        "max_num_batched_tokens": st.sampled_from([3, 16, 64, 2048]),
        "max_num_seqs": st.sampled_from([1, 3, 8]),
        "async_scheduling": st.booleans(),
        "preemption_mode": st.sampled_from(["recompute", "swap"]),
        "swap_space": st.just("1MiB"),
    }
)
drafters = st.one_of(st.none(), st.builds(HashDrafter, st.sampled_from(KINDS), st.integers(1, 9)))
refusals = st.one_of(st.just([]), st.lists(st.booleans(), max_size=30))


def is_public(request: Request) -> bool:
    return not request.tenant and not any(request.cache_salts)


def check(core, sink, arrived, exact) -> None:
    """Compare what the subscriber knows with the cache; nothing of a tenant or salt is known."""
    while events_of(core)._changes:  # until a batch is not dropped
        events_of(core)._flush()
    told, pool = sink.subscriber.blocks, core.pool
    public = numbers(pool, arrived.requests, is_public)
    assert set(told) <= public
    if exact:
        assert set(told) == public
    for block in told:
        prefix = sink.subscriber.prefix_of(block)
        assert prefix is None or last_number(pool, prefix) == block
    other = Subscriber()  # one that comes late
    for events in sink.known.snapshot(lambda: None):
        other.take(encoded(events))
    assert other.blocks == told


def encoded(events) -> bytes:
    import msgspec

    return msgspec.msgpack.encode([2e9, events])


def drive(step, core, load, after) -> None:
    aborts: dict[int, list[int]] = {}
    steps = 0

    def one() -> None:
        nonlocal steps
        for victim in aborts.pop(steps, ()):
            core.abort(victim)
        step()
        after()
        steps += 1
        assert steps < 5000, "a deadlock or livelock"

    for request_id, (gap, prompt, max_tokens, n, abort_after, fields) in enumerate(load):
        for _ in range(gap):
            one()
        add(core, request_id, prompt, fields, max_tokens=max_tokens, n=n)
        if abort_after is not None:
            aborts.setdefault(steps + abort_after, []).append(request_id)
    while core.has_work:
        one()


@given(arrivals, engine_options, st.integers(1, 3), drafters, refusals, st.integers(0, 3))
def test_a_subscriber_knows_the_prefix_cache(load, options, room, drafter, refuses, num_host_blocks):
    """Through evictions, preemption, aborts and drafts; if batches are dropped, never more than the cache has."""
    sink, arrived = DirectSink(options["block_size"], refuses), Arrived()
    need = -(-64 // options["block_size"])
    with recorded(sink):
        core = make_core(Info(num_blocks=need * room, num_host_blocks=num_host_blocks), listeners=[arrived], **options)
    core.scheduler.policies.drafter = drafter
    drive(lambda: collect(core, {}, {}), core, load, lambda: check(core, sink, arrived, exact=not any(refuses)))
    assert sink.subscriber.gaps == 0


@given(
    st.lists(arrivals, min_size=2, max_size=2),
    engine_options,
    st.sampled_from([1, 2, 3]),
    st.lists(st.sampled_from(("", "", *FAULTS)), max_size=40),
    st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 9)), min_size=1, max_size=6),
    refusals,
)
def test_blocks_of_tiers_are_told_once_they_are_used(loads, options, extent_blocks, faults, pace, refuses):
    """Two engines, one after another, over one store: the second begins with nothing, and tells nothing untrue."""
    store = FaultyStore(faults)
    sink = DirectSink(options["block_size"], refuses)
    need = -(-65 // options["block_size"])
    for load in loads:
        arrived = Arrived()
        with recorded(sink):
            rig = TieredRig(Info(num_blocks=need * 2), extent_blocks, [store], listeners=[arrived], **options)
        steps = iter(range(10**6))
        drive(
            lambda rig=rig, steps=steps: rig.step(*pace[next(steps) % len(pace)]),
            rig.core,
            load,
            lambda rig=rig, arrived=arrived: check(rig.core, sink, arrived, exact=False),
        )


def pool_of(block_size: int = 4, num_blocks: int = 16) -> tuple[RecordedPool, DirectSink]:
    sink = DirectSink(block_size)
    return RecordedPool(BlockEvents(sink, block_size), num_blocks, block_size), sink


def served(pool: RecordedPool, token_ids: list[int], **fields) -> Request:
    """A request that has come and gone."""
    request = Request(0, token_ids, SamplingParams(max_tokens=4), cache_salts=("",), **fields)
    pool.admit(request, pool.find_prefix(request))
    assert pool.extend(request, request.num_tokens) is not None
    pool.publish(request, request.num_tokens)
    pool.release(request)
    pool.events._flush()
    return request


def test_an_adopted_block_is_told_when_a_request_has_it_as_prefix():
    """Until then only its hash is known, and no token."""
    sink = DirectSink(4)
    with recorded(sink):
        rig = TieredRig(Info(num_blocks=40), 1, [FaultyStore()], block_size=4)
    pool = rig.core.pool
    request = Request(0, range(9), SamplingParams(max_tokens=4), cache_salts=("",))
    hashes = pool.hashes(request, 2)
    blocks = pool.reserve(2, ())
    pool.adopt(blocks, hashes)
    events_of(rig.core)._flush()
    assert not sink.subscriber.blocks
    pool.admit(request, pool.find_prefix(request))
    events_of(rig.core)._flush()
    assert [block.token_ids for block in sink.subscriber.blocks.values()] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_failed_step_takes_back_what_was_told():
    pool, sink = pool_of()
    request = Request(0, range(9), SamplingParams(max_tokens=4), cache_salts=("",))
    pool.admit(request, [])
    pool.extend(request, 9)
    pool.publish(request, 8)
    pool.events._flush()
    assert len(sink.subscriber.blocks) == 2
    pool.forget(request, 4)
    pool.events._flush()
    assert len(sink.subscriber.blocks) == 1


def test_nothing_of_a_tenant_or_a_salt_or_another_rope_is_told():
    pool, sink = pool_of()
    for fields in ({"tenant": "a"}, {"cache_salts": ("s",)}, {"cache_salts": ("", "yarn 2")}):
        request = Request(0, range(9), SamplingParams(max_tokens=4), **fields)
        pool.admit(request, [])
        pool.extend(request, 9)
        pool.publish(request, 9)
        pool.release(request)
    pool.events._flush()
    assert not sink.subscriber.blocks
    assert sink.num_batches == 1  # that it began


def test_blocks_of_an_adapter_have_its_name():
    pool, sink = pool_of()
    attached = Attached(adapter=AdapterRef("french", "ab" * 16, "/loras/french", 8))
    salted = {"attached": attached, "cache_salts": ("", "ab" * 16)}
    request = Request(0, range(9), SamplingParams(max_tokens=4), **salted)
    pool.admit(request, [])
    pool.extend(request, 9)
    pool.publish(request, 9)
    pool.events._flush()
    assert {block.lora_name for block in sink.subscriber.blocks.values()} == {"french"}
    guessed = Request(1, range(9), SamplingParams(max_tokens=4), attached=attached, cache_salts=("ab" * 16, "ab" * 16))
    pool.admit(guessed, [])
    pool.extend(guessed, 9)
    pool.publish(guessed, 9)
    pool.events._flush()
    assert len(sink.subscriber.blocks) == 2, "a salt of the client's that equals the adapter's is a salt"


def test_after_a_dropped_batch_prefixes_are_told_again_when_used():
    pool, _ = pool_of()
    sink = DirectSink(4, [False, False, True])
    pool.events = BlockEvents(sink, 4)
    served(pool, [*range(9)])
    assert len(sink.subscriber.blocks) == 2
    served(pool, [*range(50, 59)])  # dropped
    assert (len(sink.subscriber.blocks), sink.num_dropped) == (2, 1)
    served(pool, [*range(60, 69)])
    assert (len(sink.subscriber.blocks), sink.subscriber.num_cleared) == (2, 2)
    served(pool, [*range(9)])
    served(pool, [*range(50, 59)])
    assert len(sink.subscriber.blocks) == 6


def test_a_chain_with_a_hole_is_told_around_it():
    """An equal block of another request was in the cache in its place, and has left."""
    pool, sink = pool_of(4, 16)
    first, second = (Request(n, range(17), SamplingParams(max_tokens=4), cache_salts=("",)) for n in range(2))
    for request in (first, second):  # both compute the same blocks: the second one's are not in the cache
        pool.admit(request, [])
        pool.extend(request, 17)
    pool.publish(first, 8)
    pool.publish(second, 4)
    pool._unpublish(first.block_ids[0])
    pool._unpublish(first.block_ids[1])
    pool.publish(second, 12)
    pool._unpublish(second.block_ids[1])
    pool.publish(second, 16)
    pool.events._flush()
    told = {number(one) for one in pool._block_of}
    assert set(sink.subscriber.blocks) == told
    assert len(told) == 3
    first_hash = number(second.block_hashes[0])
    assert sink.subscriber.prefix_of(first_hash) == [0, 1, 2, 3]
    assert sink.subscriber.prefix_of(number(second.block_hashes[2])) is None  # nothing can have it as prefix


def test_a_block_before_one_that_is_told_is_told_too():
    """Another request's chain lost a block in the middle, which this one computes."""
    pool, sink = pool_of(4, 16)
    first, second = (Request(n, range(13), SamplingParams(max_tokens=4), cache_salts=("",)) for n in range(2))
    for request in (first, second):
        pool.admit(request, [])
        pool.extend(request, 13)
    pool.publish(first, 12)
    pool._unpublish(first.block_ids[1])
    pool.publish(second, 12)
    pool.events._flush()
    assert len(pool._block_of) == 3
    assert set(sink.subscriber.blocks) == {number(one) for one in pool._block_of}


def test_a_late_subscriber_gets_long_sequences_with_branches():
    sink = DirectSink(1)
    pool = RecordedPool(BlockEvents(sink, 1), 2000, 1)
    served(pool, [*range(1000)])
    for branch in (1, 127, 128, 129, 256, 600):
        served(pool, [*range(branch), *range(5000, 5100)])
    other = Subscriber()
    for events in sink.known.snapshot(lambda: None):
        before = set(other.blocks)
        other.take(encoded(events))
        for block in set(other.blocks) - before:
            assert other.prefix_of(block) is not None  # parents come first
    assert other.blocks == sink.subscriber.blocks
    assert len(other.blocks) == 1000 + 6 * 100


def test_after_a_dropped_batch_a_running_request_is_told_from_its_beginning():
    """A router takes no block whose parent it does not know."""
    pool, _ = pool_of()
    sink = DirectSink(4, [False, True])
    pool.events = BlockEvents(sink, 4)
    request = Request(0, range(17), SamplingParams(max_tokens=4), cache_salts=("",))
    pool.admit(request, [])
    pool.extend(request, 17)
    pool.publish(request, 8)
    pool.events._flush()  # dropped
    pool.publish(request, 16)
    pool.events._flush()
    assert sorted(len(sink.subscriber.prefix_of(block) or ()) for block in sink.subscriber.blocks) == [4, 8, 12, 16]


def test_after_a_dropped_batch_nothing_is_told_of_a_block_that_has_left():
    pool, _ = pool_of()
    sink = DirectSink(4, [False, True])
    pool.events = BlockEvents(sink, 4)
    request = Request(0, range(17), SamplingParams(max_tokens=4), cache_salts=("",))
    pool.admit(request, [])
    pool.extend(request, 17)
    pool.publish(request, 12)
    pool.events._flush()  # dropped
    pool._unpublish(request.block_ids[1])
    pool.publish(request, 16)
    pool.events._flush()
    assert set(sink.subscriber.blocks) == {number(one) for one in pool._block_of}
    assert len(sink.subscriber.blocks) == 3
