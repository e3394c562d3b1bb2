"""KV tiers in the engine: what is loaded, for whom, and that it is right."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
from engine_rig import add, done_step
from kv_memory import MemoryStore
from tier_conversations import PROMPT, answer, from_tiers, num_computed, rig_of, serve, stored
from tiers_rig import FaultyStore

from inflight.engine.attached import Attached
from inflight.engine.messages import AddRequest
from inflight.engine.policies import tier_admission
from inflight.engine.pooling import Pooling
from inflight.engine.request import Request
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import SchedulerOutput
from inflight.engine.tiers.seal import Seal
from inflight.engine.tiers.tier import Tier
from inflight.frontend.request.pooled_request import void_params
from inflight.runner.tier_threads import TierThreads

pytestmark = pytest.mark.usefixtures("half_a_millisecond_a_token")


def test_a_conversation_that_returns_to_a_new_engine_is_not_computed():
    store = stored()
    assert len(store.extents) == (41 + 7) // 4  # the last token of the output has no KV
    rig = rig_of(store)
    serve(rig, 0, [*PROMPT, *answer(PROMPT, 8), 3])
    assert num_computed(rig) == 50 - 48
    assert rig.tiers.num_queries == rig.tiers.num_hits == 48


@pytest.mark.parametrize("extent_blocks", [2, 3, 5, 16])
@pytest.mark.parametrize("length", [30, 33, 41])
def test_the_last_extent_of_a_sequence_is_a_part(extent_blocks, length):
    """The next turn takes all full blocks of the earlier one."""
    prompt = PROMPT[:length]
    store = stored(prompt, extent_blocks=extent_blocks)
    num_blocks = (length + 7) // 4
    assert len(store.extents) == -(-num_blocks // extent_blocks)
    for turn in ([*prompt, *answer(prompt, 8), 3], [*prompt, *answer(prompt, 8), *[1] * 14]):
        rig = rig_of(store, extent_blocks=extent_blocks)
        serve(rig, 0, turn)
        assert num_computed(rig) == len(turn) - num_blocks * 4
        assert not rig.tiers.tiers[0].errors


def test_the_longest_part_of_an_extent_is_taken():
    """Of turns that ended in the same extent; another conversation goes on from the first of them."""
    store = stored(PROMPT[:20], extent_blocks=16)
    serve(rig_of(store, extent_blocks=16), 0, PROMPT[:33])
    assert len(store.extents) == 2
    rig = rig_of(store, extent_blocks=16)
    serve(rig, 0, [*PROMPT[:33], *answer(PROMPT[:33], 8), *[6] * 9])
    assert num_computed(rig) == 33 + 8 + 9 - 40
    rig = rig_of(store, extent_blocks=16)
    serve(rig, 0, [*PROMPT[:20], *answer(PROMPT[:20], 8), *[6] * 30])
    assert num_computed(rig) == 20 + 8 + 30 - 24
    rig = rig_of(store, extent_blocks=16)
    serve(rig, 0, PROMPT)
    assert num_computed(rig) == 41  # neither ended within it


def test_a_part_in_one_tier_gives_way_to_the_whole_extent_in_another():
    first, second = stored(PROMPT[:20], extent_blocks=4), stored(PROMPT, extent_blocks=4)
    turn = [*PROMPT[:20], *answer(PROMPT[:20], 8), 3]
    assert len(first.extents) == 2
    rig = rig_of(first, second, extent_blocks=4)
    serve(rig, 0, turn)
    assert num_computed(rig) == 29 - 24
    rig = rig_of(first, second, extent_blocks=4)
    serve(rig, 0, PROMPT)
    assert num_computed(rig) == 41 - 32


def test_a_block_that_the_step_in_flight_writes_is_filled_after_it():
    """A request ended with the token of a step, and the next one, made before, computes a wasted row."""
    prompt = [9, 8, 7, 6, 5]
    said = answer(prompt, 9)
    last = next(n for n in range(4, 9) if said[n] not in said[:n])
    rig = rig_of(stored(), async_scheduling=True)
    add(rig.core, 0, prompt, max_tokens=20, ignore_eos=True, stop_token_ids=[said[last]])
    while len(rig.outputs.get((0, 0), [])) < last - 1:
        rig.step()
    add(rig.core, 1, PROMPT, max_tokens=4, ignore_eos=True)
    while (0, 0) not in rig.reasons:
        rig.step()
    assert rig.core.has_work and len(rig.core._launched) == 1
    in_flight = set(rig.runner.tables[rig.core._launched[0].out.slots[0]])
    rig.step(99, num_beside=99)
    assert in_flight & rig.core.pool.reserved and not rig.tiers.tiers[0].num_loaded
    rig.run()
    assert rig.outputs[1, 0] == answer(PROMPT, 4)
    assert num_computed(rig) == len(prompt) + 1


def test_blocks_that_are_still_to_be_copied_out_are_not_filled():
    """An urgent request took the place of a victim whose KV goes to the host in the step that is being made."""
    rig = rig_of(stored())
    loads = from_tiers(rig)._loads
    victim = Request(0, PROMPT[:8], SamplingParams(max_tokens=9))
    start = partial(loads.start, rig.tiers.tiers[0], [b"hash" * 4], 0, 1, [])
    loads.left(victim)
    assert start() is None
    for running, waits in (([], False), ([victim], True)):  # no step is made, or one
        loads.step_begins(running)
        rig.now += 0.001
        loads.step_begins(running)
        assert loads.come_within(1.0, rig.tiers.tiers[0], b"hash" * 4, 1) is waits
    loads.step_made(SchedulerOutput())
    load = start()
    assert load is not None and not rig.hand.tasks
    loads.step_done(done_step(SchedulerOutput(), 1.0))
    assert rig.hand.tasks
    loads.leave(load)
    loads.left(victim)
    loads.ended(victim)  # it was not preempted
    assert start() is not None


def test_a_preempted_request_gets_its_blocks_back_from_a_tier():
    rig = rig_of(MemoryStore(), num_blocks=24)
    prompts = [[n + 1, *PROMPT[:24]] for n in range(4)]
    for request_id, prompt in enumerate(prompts):
        add(rig.core, request_id, prompt, max_tokens=30, ignore_eos=True)
    rig.run()
    assert rig.core.scheduler.num_preempted_total and rig.tiers.num_hits
    assert [rig.outputs[n, 0] for n in range(4)] == [answer(prompt, 30) for prompt in prompts]


def test_tenants_and_salts_never_meet():
    store = stored(fields={"tenant": "a"})
    for fields in ({"tenant": "b"}, {"tenant": "a", "cache_salt": "s"}, {}):
        rig = rig_of(store)
        serve(rig, 0, PROMPT, fields)
        assert num_computed(rig) == 41
        assert store.asked and not set(store.asked) & set(rig.payloads(PROMPT, "a"))
        store.asked.clear()


def test_without_the_secret_nothing_is_found_and_names_tell_nothing():
    store = stored(secret=b"the secret of us all")
    for secret in (b"", b"another secret of ours"):
        rig = rig_of(store, secret=secret)
        serve(rig, 0, PROMPT)
        assert num_computed(rig) == 41
    rig = rig_of(store, secret=b"the secret of us all")
    serve(rig, 0, PROMPT)
    assert num_computed(rig) == 1


def test_requests_with_one_prefix_share_its_loads():
    store = stored()
    rig = rig_of(store, max_num_seqs=64)
    for request_id in range(50):
        add(rig.core, request_id, [*PROMPT[:40], request_id % 9], max_tokens=2, ignore_eos=True)
    for _ in range(30):
        rig.step(3)
    rig.run()
    assert [rig.outputs[n, 0] for n in range(50)] == [answer([*PROMPT[:40], n % 9], 2) for n in range(50)]
    loaded = rig.tiers.tiers[0].num_loaded
    assert loaded == rig.tiers.num_hits // 4 == 10


def test_a_part_that_is_cached_is_not_loaded():
    store = stored(extent_blocks=16)
    rig = rig_of(store, extent_blocks=16)
    serve(rig, 0, PROMPT)
    store.asked.clear()
    kept = set(store.extents)
    serve(rig, 1, [*PROMPT, *answer(PROMPT, 8), *[6] * 14])
    assert store.asked and not kept & set(store.asked)


def test_a_part_that_another_request_has_computed_meanwhile_is_not_loaded():
    rig = rig_of(stored(extent_blocks=16), extent_blocks=16)
    turn = [*PROMPT, *answer(PROMPT, 8), *[6] * 6]
    add(rig.core, 0, turn, max_tokens=2, ignore_eos=True)
    rig.step()
    add(rig.core, 1, turn, max_tokens=2, prompt_logprobs=1, ignore_eos=True)  # looks for no prefix
    rig.step()
    with mock.patch.object(from_tiers(rig)._loads, "start") as start:
        rig.run()
    assert not start.called and rig.outputs[0, 0] == answer(turn, 2)


@pytest.mark.parametrize("answered", [OSError(5, "the medium fails"), [None], ["1"]])
def test_whole_extents_are_taken_though_the_question_for_parts_fails(answered):
    store = stored(extent_blocks=4)
    rig = rig_of(store, extent_blocks=4)
    with mock.patch.object(store, "first_of", side_effect=answered):
        serve(rig, 0, PROMPT)
    assert num_computed(rig) == 41 - 32 and rig.tiers.tiers[0].errors == {"io": 1}


def test_a_question_for_parts_that_cannot_be_made_ends_no_thread():
    """With the thread that asks, every later request would wait for its answer until computing had ended."""
    tier = Tier("disk", MemoryStore(), Seal(bytes(16)), TierThreads)
    assert tier.find([b"key"], lambda found: [b"other"][found + 1]).result(30) == (0, None)
    assert tier.find([b"key"]).result(30) == (0, None)
    assert tier.errors == {"io": 1}
    tier.close(30)


def test_a_store_that_fails_is_left_alone_for_a_while():
    store = FaultyStore(["raise"] * 4)
    rig = rig_of(store)
    tier = rig.tiers.tiers[0]
    for _ in range(3):
        tier.find([b"key"])
        rig.hand.run(1)
    assert not tier.is_open and tier.errors == {"io": 3}
    serve(rig, 0, PROMPT)
    assert not store.asked[3:] and not store.given
    rig.now += 31
    assert tier.is_open
    tier.find([b"key"])
    rig.hand.run(1)
    assert not tier.is_open  # one more error is enough
    rig.now += 31
    serve(rig, 1, PROMPT[::-1])
    assert store.given


def test_what_must_not_be_asked_for_is_not():
    store = stored()
    rig = rig_of(store)
    serve(rig, 0, PROMPT[:5])  # computed in 2 ms
    add(rig.core, 1, PROMPT, max_tokens=2, prompt_logprobs=1)
    message = AddRequest(2, PROMPT, void_params(), attached=Attached(pooling=Pooling("embed", "mean")))
    assert rig.core.add_request(message) is None
    rig.run()
    assert not store.asked


def test_a_faster_tier_gets_what_a_slower_one_had():
    slow, fast = stored(), MemoryStore()
    rig = rig_of(fast, slow)
    serve(rig, 0, PROMPT)
    assert num_computed(rig) == 1 and len(fast.extents) == 12
    slow.asked.clear()
    rig = rig_of(fast, slow)
    serve(rig, 0, PROMPT)
    assert num_computed(rig) == 1 and not slow.asked


def test_what_one_tier_has_lost_comes_from_another():
    first, second = stored(), stored()
    keys = list(first.extents)
    for index, key in enumerate(keys):
        del (second if index in (0, 1, 6, 7) else first).extents[key]
    for key in keys[8:]:
        first.extents[key] = second.extents.pop(key)
    rig = rig_of(first, second)
    serve(rig, 0, PROMPT)
    assert num_computed(rig) == 1


def test_loads_outlive_the_core_that_began_them():
    """After an interrupted turn `LLM` makes the core anew, and a load still writes to the pool."""
    store = stored()
    reserved: list[int] = []
    left: list[int] = []
    rig = rig_of(store)
    load = store.load

    def interrupted(key: bytes, frames: Any) -> bool:
        if not reserved:
            reserved.extend(rig.core.pool.reserved)
            rig.new_core()
            rig.check()
            rig.core.scheduler.schedule()
            left.extend(rig.core.pool.reserved)
        return load(key, frames)

    add(rig.core, 0, PROMPT, max_tokens=4, ignore_eos=True)
    with mock.patch.object(store, "load", side_effect=interrupted):
        while not reserved:
            rig.step(1)
        serve(rig, 1, PROMPT)
    assert len(reserved) == 10 and len(left) == 1  # nothing fills the others: their loads had not begun
    assert num_computed(rig) == 1
    assert not rig.core.pool.reserved


def test_room_that_a_load_took_is_not_given_twice(monkeypatch):
    """The request was to start beside a load that has begun, and is found not to be worth waiting for."""
    rig = rig_of(stored(), num_blocks=64)
    asked = []
    inner = from_tiers(rig)
    admits = inner._inner.admits
    monkeypatch.setattr(inner._inner, "admits", lambda *args: asked.append(1) or admits(*args))
    monkeypatch.setattr(inner, "_is_coming", lambda *args: False)
    add(rig.core, 0, PROMPT, max_tokens=2, ignore_eos=True)
    rig.step()
    assert len(asked) == 2


def test_a_pool_for_one_request_lends_no_blocks():
    rig = rig_of(stored(), num_blocks=16)
    serve(rig, 0, PROMPT)
    assert num_computed(rig) == 41 and rig.core.pool.most_reserved == 0


def test_a_head_that_was_cached_long_ago_is_not_evicted_while_its_rest_is_loaded(monkeypatch):
    """The loads take free blocks, and other prompts then evict what was used least recently."""
    monkeypatch.setattr(tier_admission, "_UNMEASURED_SECONDS", 5e-2)
    rig = rig_of(stored(), num_blocks=64)
    serve(rig, 9, PROMPT[:21], max_tokens=1)
    for request_id in range(10, 13):
        serve(rig, request_id, PROMPT[:40], {"cache_salt": str(request_id)}, max_tokens=1)
    rig.tiers.num_hits = 0
    add(rig.core, 0, PROMPT, max_tokens=4, ignore_eos=True)
    rig.step()
    rig.step(1)
    assert len(rig.tiers.loads) == 5
    for request_id in (1, 2):
        add(rig.core, request_id, PROMPT[:40], {"cache_salt": str(request_id)}, max_tokens=16, ignore_eos=True)
    while len(rig.outputs.get((2, 0), ())) < 14:
        with mock.patch.object(tier_admission, "_FEW_SECONDS", 99.0):  # these do not look
            rig.step()
    assert len(rig.core.pool._free) == 0 and len(rig.tiers.loads) == 5
    [request] = rig.core.scheduler.held
    assert len(rig.core.pool.find_prefix(request)) == 5
    rig.run()
    assert rig.outputs[0, 0] == answer(PROMPT, 4)
    assert rig.tiers.num_hits == 20
