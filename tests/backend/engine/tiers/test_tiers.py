"""KV tiers in the engine: what is loaded and what is kept, when, for whom, and how long a request waits."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import Any
from unittest import mock

import pytest
from drafters import add_gate
from engine_rig import Info, add, done_step, expected_output
from kv_memory import MemoryStore
from tiers_rig import ByteRunner, FaultyStore, TieredRig

from inflight.engine.attached import Attached
from inflight.engine.messages import AddRequest
from inflight.engine.policies import tier_admission
from inflight.engine.pooling import Pooling
from inflight.engine.request import Request, Status
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.engine.tiers import writer
from inflight.engine.tiers.seal import Seal
from inflight.engine.tiers.tier import Tier
from inflight.engine.tiers.tiered_pool import TieredPool
from inflight.frontend.request.pooled_request import void_params
from inflight.runner.tier_threads import TierThreads

PROMPT = [1 + n % 7 for n in range(41)]
OPTIONS: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4}


@pytest.fixture(autouse=True)
def half_a_millisecond_a_token(monkeypatch):
    """On the clock of these engines computing takes no time, and is never measured."""
    monkeypatch.setattr(tier_admission, "_UNMEASURED_SECONDS", 5e-4)


def rig_of(
    *stores: Any,
    extent_blocks: int = 1,
    num_blocks: int = 256,
    secret: bytes = b"",
    cpu_seconds: float = 0.0,
    **options: Any,
) -> TieredRig:
    info = Info(num_blocks=num_blocks)
    return TieredRig(info, extent_blocks, stores, secret, cpu_seconds=cpu_seconds, **{**OPTIONS, **options})


def serve(rig: TieredRig, request_id: int, prompt: list[int], fields: Any = None, **params: Any) -> list[int]:
    """The output of a request that is served alone, and is right."""
    add(rig.core, request_id, prompt, fields, **{"max_tokens": 8, "ignore_eos": True, **params})
    rig.run()
    output = rig.outputs[request_id, 0]
    assert output == answer(prompt, len(output))
    return output


def answer(prompt: list[int], count: int) -> list[int]:
    return expected_output(prompt, SamplingParams(max_tokens=count, ignore_eos=True), Info())[0]


def stored(prompt: list[int] = PROMPT, fields: Any = None, **options: Any) -> MemoryStore:
    """A store that has a conversation's extents."""
    store = MemoryStore()
    serve(rig_of(store, **options), 0, prompt, fields)
    assert store.extents
    store.asked.clear()
    return store


def from_tiers(rig: TieredRig) -> tier_admission.TierAdmission:
    policy: Any = rig.core.scheduler.policies.admission
    while not isinstance(policy, tier_admission.TierAdmission):
        policy = policy._inner
    return policy


def num_computed(rig: TieredRig) -> int:
    return rig.core.pool.num_prefix_queries - rig.core.pool.num_prefix_hits


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


def test_of_a_running_request_only_whole_extents_are_kept():
    store = MemoryStore()
    rig = rig_of(store, extent_blocks=4)
    add(rig.core, 0, PROMPT, max_tokens=30, ignore_eos=True)
    while len(rig.outputs.get((0, 0), [])) < 20:
        rig.step(99)
    sizes = {len(extent) for extent in store.extents.values()}
    assert len(store.extents) == 60 // 16 and len(sizes) == 1


def test_what_a_running_request_has_computed_is_kept_before_it_ends():
    store = MemoryStore()
    rig = rig_of(store)
    add(rig.core, 0, PROMPT, max_tokens=20, ignore_eos=True)
    while len(rig.outputs.get((0, 0), [])) < 18:
        rig.step(99)
    assert len(store.extents) >= (41 + 8) // 4
    resumed = rig_of(store)
    given = rig.outputs[0, 0]
    fields = {"output_token_ids": [given]}  # as the frontend replays it after the engine's death
    add(resumed.core, 0, PROMPT, fields, max_tokens=20, ignore_eos=True)
    resumed.run()
    assert given + resumed.outputs[0, 0] == answer(PROMPT, 20)
    assert num_computed(resumed) < 20


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_step_in_flight_of_an_aborted_request_is_waited_for(asynchronous):
    """Its last block is full with the token that the step in flight computes."""
    store = FaultyStore()
    rig = rig_of(store, async_scheduling=asynchronous)
    add(rig.core, 0, PROMPT[:8], max_tokens=20, ignore_eos=True)
    while len(rig.outputs.get((0, 0), [])) < 4:
        rig.step()
    rig.core.abort(0)
    rig.hand.run(99)
    add(rig.core, 1, [9], max_tokens=2)
    rig.run()
    tokens = [*PROMPT[:8], *answer(PROMPT[:8], 4)]
    assert store.given and store.given.items() <= rig.payloads(tokens).items()


def test_blocks_that_others_write_before_they_are_copied_are_left_out():
    store = FaultyStore()
    rig = rig_of(store, num_blocks=17)
    add(rig.core, 0, PROMPT, max_tokens=2, ignore_eos=True)
    while rig.core.has_work:
        rig.step()
    assert rig.hand.tasks
    add(rig.core, 1, [8] * 60, max_tokens=2, ignore_eos=True)
    while rig.core.has_work:
        rig.step()
    rig.run()
    sound = rig.payloads([*PROMPT, *answer(PROMPT, 2)]) | rig.payloads([*[8] * 60, *answer([8] * 60, 2)])
    assert store.given.items() <= sound.items()


def test_blocks_that_another_request_gets_before_their_step_has_run_are_left_out():
    """Its request was preempted while the step that fills them was in flight."""
    rig = rig_of(MemoryStore(), block_size=1)
    pool = TieredPool(4, 1, 1)
    listener = writer.TierWriter(rig.tiers, pool)
    for others_blocks, num_kept in ((1, 3), (2, 2)):
        request = Request(0, PROMPT[:3], SamplingParams(max_tokens=9))
        pool.admit(request, [])
        pool.extend(request, 3)
        request.num_computed_tokens = 3
        listener.admitted(request, 0)
        request.token_ids.append(others_blocks)
        request.num_tokens += 1
        listener.step_made(SchedulerOutput())
        pool.publish(request, 3)
        listener.left(request)
        pool.release(request)
        assert not rig.hand.tasks
        other = Request(1, [9] * 2, SamplingParams(max_tokens=9))
        pool.extend(other, others_blocks)
        listener.step_done(done_step(SchedulerOutput(), 1.0))
        assert len(rig.hand.tasks) == num_kept
        rig.hand.tasks.clear()
        rig.tiers.tiers[0]._kept.clear()
        pool.release(other)
        pool.forget(request, 0)


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
    loads.step_made(SchedulerOutput())
    load = start()
    assert load is not None and not rig.hand.tasks
    loads.step_done(done_step(SchedulerOutput(), 1.0))
    assert rig.hand.tasks
    loads.leave(load)
    loads.left(victim)
    loads.ended(victim)  # it was not preempted
    assert start() is not None


@pytest.mark.parametrize(("status", "num_kept"), [(Status.WAITING, 1), (Status.FINISHED, 2)])
def test_a_preempted_request_leaves_its_whole_extents_and_no_part(status, num_kept):
    rig = rig_of(MemoryStore(), block_size=1, extent_blocks=4)
    pool = TieredPool(8, 1, 1)
    listener = writer.TierWriter(rig.tiers, pool)
    request = Request(0, PROMPT[:6], SamplingParams(max_tokens=9))
    pool.admit(request, [])
    pool.extend(request, 6)
    request.num_computed_tokens = 6
    listener.admitted(request, 0)
    request.token_ids.append(1)
    request.num_tokens += 1
    listener.step_made(SchedulerOutput())
    listener.left(request)
    request.status = status
    listener.step_done(done_step(SchedulerOutput(), 1.0))
    assert len(rig.hand.tasks) == num_kept


def test_what_an_aborted_request_leaves_is_kept_though_no_step_follows():
    rig = rig_of(MemoryStore(), async_scheduling=False)
    add(rig.core, 0, PROMPT[:9], max_tokens=20, ignore_eos=True)
    while len(rig.outputs.get((0, 0), [])) < 3:
        rig.step()
    rig.hand.run(99)
    rig.core.abort(0)
    assert not rig.core.has_work and rig.hand.tasks


@pytest.mark.parametrize(("length", "num_kept"), [(12, 0), (16, 1), (27, 1)])
def test_a_short_part_of_an_extent_is_not_kept(length, num_kept):
    """Of less than a quarter: most turns of a chat would leave one, and no turn reads it again but the next."""
    store = MemoryStore()
    rig = rig_of(store, extent_blocks=16)
    serve(rig, 0, PROMPT[: length - 3], max_tokens=4)
    assert len(store.extents) == num_kept


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


@pytest.mark.parametrize("what", ["find", "load"])
def test_no_request_waits_longer_than_computing_takes(what):
    """The store hangs.  41 tokens take 20 ms; others go on meanwhile."""
    rig = rig_of(stored())
    add(rig.core, 0, PROMPT, max_tokens=4, ignore_eos=True)
    add(rig.core, 1, [5], max_tokens=30, ignore_eos=True)
    if what == "load":
        while not rig.tiers.loads:
            rig.step(1)
        reserved = list(rig.core.pool.reserved)
    waited = 0
    while (0, 0) not in rig.outputs:
        rig.step()
        waited += 1
    assert 2 <= waited <= 23
    assert len(rig.outputs[1, 0]) >= waited - 1
    while rig.core.has_work:
        rig.step()
    assert rig.outputs[0, 0] == answer(PROMPT, 4)
    if what == "load":
        assert rig.core.pool.reserved <= set(reserved)
    rig.hand.run(99)
    rig.core.step()
    assert not rig.core.pool.reserved


def test_a_load_that_nobody_waits_for_is_not_begun():
    rig = rig_of(stored())
    add(rig.core, 0, PROMPT, max_tokens=4, ignore_eos=True)
    while not rig.tiers.loads:
        rig.step(1)
    assert rig.core.pool.reserved
    rig.core.abort(0)
    rig.check()
    assert not rig.core.pool.reserved and not rig.core.has_work
    rig.hand.run(99)
    assert not rig.tiers.tiers[0].num_loaded


def test_a_request_whose_grammar_took_long_does_not_fail_because_it_waits_for_a_tier():
    """It was held for something else, and would fail 16 s later."""
    rig = rig_of(stored())
    [gate] = [add_gate(rig.core, {0: 1})]
    add(rig.core, 0, PROMPT, max_tokens=4, ignore_eos=True)
    with mock.patch.object(tier_admission, "_UNMEASURED_SECONDS", 1.0):
        rig.step()
        assert not gate.waits[0] and rig.core.scheduler.held
        [request] = rig.core.scheduler.held
        request.held_until = rig.now + 16
        rig.step()
        assert rig.core.scheduler.held
        rig.now += 1.1
        rig.step()
        rig.step()
    assert rig.outputs[0, 0]


def test_beside_running_requests_loads_take_a_tenth_of_a_core():
    """Nine extents, each 0.3 ms of a core; a step takes a millisecond."""
    rig = rig_of(stored(PROMPT[:36]), cpu_seconds=3e-4)
    add(rig.core, 1, [5], max_tokens=60, ignore_eos=True)
    rig.step()
    add(rig.core, 0, PROMPT[:37], max_tokens=4, ignore_eos=True)
    loaded = []
    with mock.patch.object(tier_admission, "_UNMEASURED_SECONDS", 2e-3):  # 72 ms to compute; 27 at this pace
        while (0, 0) not in rig.outputs:
            rig.step(99)
            loaded.append(rig.tiers.tiers[0].num_loaded)
    assert rig.tiers.num_hits == 36
    per_step = [after - before for before, after in itertools.pairwise(loaded)]
    assert max(per_step) == 1 and max(sum(per_step[n : n + 10]) for n in range(len(per_step))) == 4
    assert rig.outputs[0, 0] == answer(PROMPT[:37], len(rig.outputs[0, 0]))


def test_a_request_that_waits_for_its_loads_costs_a_step_next_to_nothing(monkeypatch):
    """Of fifty on one prefix, a step looks up no block that it has found, and asks no other policy."""
    rig = rig_of(stored(), max_num_seqs=64)
    asked, looked_up = [], []
    policy = from_tiers(rig)
    admits = policy._inner.admits
    monkeypatch.setattr(policy._inner, "admits", lambda *args: asked.append(1) or admits(*args))
    for request_id in range(50):
        add(rig.core, request_id, [*PROMPT[:40], request_id % 9], max_tokens=2, ignore_eos=True)
    rig.step()
    rig.step(50)  # all have asked, and wait for the first one's loads
    while len(rig.core.pool._block_of) < 6:
        rig.step(1)
    blocks = rig.core.pool._block_of

    class Counted(dict):
        def get(self, key: bytes, default: Any = None) -> Any:
            looked_up.append(key)
            return super().get(key, default)

    rig.core.pool._block_of = Counted(blocks)
    asked.clear()
    rig.core.step()
    assert len(rig.core.scheduler.held) == 50 and not asked
    assert len(looked_up) <= 50
    rig.core.pool._block_of = blocks
    rig.run()
    assert len(rig.outputs) == 50


def test_a_long_step_earns_loads_no_more_than_a_few_milliseconds():
    rig = rig_of(stored(), cpu_seconds=3e-4)
    add(rig.core, 1, [5], max_tokens=60, ignore_eos=True)
    rig.step()
    rig.now += 1.0
    rig.step()
    assert from_tiers(rig)._loads._left == pytest.approx(5e-3)


def test_conversations_that_return_together_do_not_all_wait_for_a_pace_that_serves_a_few():
    """Each has nine extents, at 0.3 ms: 27 ms at the pace, and computing one takes 72."""
    prompts = [[n + 1, *PROMPT[1:36]] for n in range(8)]
    store = MemoryStore()
    for prompt in prompts:
        serve(rig_of(store), 0, prompt)
    rig = rig_of(store, max_num_seqs=16, cpu_seconds=3e-4)
    add(rig.core, 99, [5], max_tokens=60, ignore_eos=True)
    rig.step()
    for request_id, prompt in enumerate(prompts):
        add(rig.core, request_id, [*prompt, 3], max_tokens=4, ignore_eos=True)
    with mock.patch.object(tier_admission, "_UNMEASURED_SECONDS", 2e-3):
        for _ in range(5):
            rig.step(99)
        assert len(rig.core.scheduler.held) == 2
        rig.run()
    assert rig.tiers.num_hits == 2 * 36
    assert all(rig.outputs[n, 0] == answer([*prompts[n], 3], 4) for n in range(8))


def test_a_request_that_starts_is_not_looked_for_any_more():
    store = stored()
    rig = rig_of(store)
    add(rig.core, 0, PROMPT, max_tokens=4, ignore_eos=True)
    rig.step()
    rig.core.abort(0)
    rig.hand.run(99)
    assert not store.asked


def test_a_tier_with_more_questions_than_it_answers_in_time_is_not_asked():
    store = stored()
    rig = rig_of(store, max_num_seqs=16)
    rig.tiers.tiers[0]._find_seconds = 0.006  # of the 20 ms that computing takes, 16 are worth waiting
    for request_id in range(8):
        add(rig.core, request_id, [*PROMPT[:40], request_id], max_tokens=4, ignore_eos=True)
    rig.step()
    assert len(rig.hand.tasks) == 3 and len(rig.core.scheduler.held) == 3
    rig.run()
    assert len(rig.reasons) == 8


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


def test_a_part_that_a_tier_has_lost_is_kept_again():
    store = MemoryStore()
    rig = rig_of(store, extent_blocks=16)
    serve(rig, 0, PROMPT)
    [key] = store.extents
    store.extents.clear()
    rig.new_core()  # nothing is cached
    serve(rig, 1, [*PROMPT, *answer(PROMPT, 8)], max_tokens=2)
    assert [*store.extents] == [key]


@pytest.mark.parametrize("answered", [OSError(5, "the medium fails"), [None], ["1"]])
def test_whole_extents_are_taken_though_the_question_for_parts_fails(answered):
    store = stored(extent_blocks=4)
    rig = rig_of(store, extent_blocks=4)
    with mock.patch.object(store, "first_of", side_effect=answered):
        serve(rig, 0, PROMPT)
    assert num_computed(rig) == 41 - 32 and rig.tiers.tiers[0].errors == {"io": 1}


def test_where_nothing_runs_loads_take_all_there_is():
    rig = rig_of(stored(), cpu_seconds=3e-4)
    add(rig.core, 0, PROMPT, max_tokens=4, ignore_eos=True)
    for _ in range(4):  # asked, begun, adopted
        rig.step(99)
    assert rig.tiers.num_hits == 40


def test_loads_that_would_take_a_core_too_long_beside_others_are_not_waited_for():
    """Ten extents at 0.3 ms: 30 ms at the pace, and computing them takes 20."""
    rig = rig_of(stored(), cpu_seconds=3e-4)
    add(rig.core, 1, [5], max_tokens=60, ignore_eos=True)
    rig.step()
    add(rig.core, 0, PROMPT, max_tokens=4, ignore_eos=True)
    for _ in range(4):
        rig.step(99)
    assert rig.outputs[0, 0]


def test_writes_that_wait_are_not_dropped():
    """A prompt of a large model has hundreds of extents, and all of them are computed at the same time."""
    gate, store = threading.Event(), MemoryStore()
    tier = Tier("disk", store, Seal(bytes(16)), TierThreads)
    frames = [memoryview(b"kv")]
    for number in range(600):
        tier.store(number.to_bytes(16, "big"), lambda: gate.wait(30) and frames)
    gate.set()
    tier.close(30)
    assert tier.num_stored == len(store.extents) == 600 and not tier.num_dropped


@pytest.mark.parametrize("keeps", [True, False])
def test_tiers_share_a_copy_while_one_has_it(keeps):
    """It is made again otherwise: bytes do not pile up before a store that is slow."""
    rig, kept, made = rig_of(MemoryStore(), MemoryStore()), [], []
    with mock.patch.object(rig.runner, "copy", side_effect=lambda blocks: made.append(blocks) or memoryview(b"kv" * 8)):
        rig.tiers.store(rig.tiers.tiers, b"hash", [1, 2], [0] * 9)
        for _, _, (_, copied) in rig.hand.tasks:
            kept = [kept, copied()] if keeps else [copied() is None]
    assert len(made) == (1 if keeps else 2)


def test_a_slow_tier_is_not_waited_for():
    rig = rig_of(stored())
    rig.tiers.tiers[0]._extent_seconds = 0.01  # 10 extents: 50 ms, and computing them takes 20
    add(rig.core, 0, PROMPT, max_tokens=4, ignore_eos=True)
    for _ in range(3):
        rig.step(1)
    assert rig.outputs[0, 0]


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


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("number", range(4, 12))
def test_a_failed_step_leaves_nothing_in_a_store(number, asynchronous):
    store = FaultyStore()
    rig = rig_of(store, async_scheduling=asynchronous)
    steps = itertools.count()

    def failing(ticket: Any) -> StepOutput:
        if next(steps) == number:  # it is not computed
            return StepOutput(failure="out of memory")
        return ByteRunner.collect(rig.runner, ticket)

    rig.runner.collect = failing  # type: ignore[method-assign]
    add(rig.core, 0, PROMPT[:10], max_tokens=30, ignore_eos=True)
    with mock.patch.object(writer, "_EVERY", 1), pytest.raises(AssertionError, match="out of memory"):
        rig.run()
    rig.hand.run(99)
    assert store.given and store.given.items() <= rig.payloads(PROMPT[:10] + answer(PROMPT[:10], 30)).items()


def test_a_request_that_never_yielded_a_token_leaves_nothing():
    store = MemoryStore()
    rig = rig_of(store, max_num_batched_tokens=8)
    add(rig.core, 0, PROMPT, max_tokens=4)
    for _ in range(3):
        rig.step(9)
    rig.core.abort(0)
    rig.hand.run(99)
    assert not store.extents


def test_a_medium_that_wears_out_gets_only_what_is_computed_twice():
    store = MemoryStore()
    rig = TieredRig(Info(num_blocks=256), 1, [store], second=True, **OPTIONS)
    serve(rig, 0, PROMPT)
    assert not store.extents
    serve(rig, 1, PROMPT)
    assert len(store.extents) == 12


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


def test_writes_that_wait_for_an_earlier_core_are_left_out():
    """The next core's requests take the same blocks, and the earlier one's generations do not tell."""
    store = FaultyStore()
    rig = rig_of(store)
    add(rig.core, 0, PROMPT, max_tokens=4, ignore_eos=True)
    while rig.core.has_work:
        rig.step()
    assert any(work.__name__ == "_write" for _, work, _ in rig.hand.tasks)
    rig.new_core()
    serve(rig, 1, PROMPT[::-1])
    assert store.given and store.given.items() <= rig.payloads(PROMPT[::-1] + answer(PROMPT[::-1], 8)).items()


def test_a_prompt_that_a_tier_has_lost_is_kept_again_as_a_whole():
    store = MemoryStore()
    rig = rig_of(store)
    serve(rig, 0, PROMPT)
    whole = rig.payloads(PROMPT).keys()
    assert len(whole) > 5 and whole <= store.extents.keys()
    store.extents.clear()
    rig.new_core()  # nothing is cached
    serve(rig, 1, PROMPT)
    assert whole <= store.extents.keys()


def test_a_medium_that_cannot_be_written_is_read():
    rig = rig_of(MemoryStore())
    tier = rig.tiers.tiers[0]
    with mock.patch.object(MemoryStore, "store", side_effect=OSError(28, "no space is left")):
        serve(rig, 0, PROMPT)
    assert tier.errors["full"] >= 3
    assert tier.is_open and not tier.wants(b"key")
    rig.now += 31
    assert tier.wants(b"key")


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


def test_an_answer_that_takes_a_second_is_not_waited_for_though_computing_takes_longer(monkeypatch):
    monkeypatch.setattr(tier_admission, "_UNMEASURED_SECONDS", 1.0)
    rig = rig_of(stored())
    add(rig.core, 0, PROMPT, max_tokens=4, ignore_eos=True)
    rig.step()
    rig.tiers.tiers[0]._began[0] = rig.now  # a thread has begun, and hangs
    rig.step()
    assert rig.core.scheduler.held
    rig.now += 1.1
    rig.step()
    rig.step()
    assert rig.outputs[0, 0]
