"""KV tiers in the engine: what is kept, and when."""

from __future__ import annotations

import itertools
import threading
from contextlib import nullcontext
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from engine_rig import Info, add, done_step
from kv_memory import MemoryStore
from tier_conversations import OPTIONS, PROMPT, answer, num_computed, rig_of, serve
from tiers_rig import ByteRunner, FaultyStore, TieredRig

from inflight import worker
from inflight.engine.deltas import StepStats
from inflight.engine.frontend_channels import Frontend, Frontends
from inflight.engine.heartbeat import Heartbeat
from inflight.engine.messages import EngineReady, Shutdown, StepMessage, decode_to_frontend
from inflight.engine.request import Request, Status
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.step import SchedulerOutput, StepOutput
from inflight.engine.tiers import writer
from inflight.engine.tiers.seal import Seal
from inflight.engine.tiers.tier import Tier
from inflight.engine.tiers.tiered_pool import TieredPool
from inflight.runner.tier_threads import TierThreads

pytestmark = pytest.mark.usefixtures("half_a_millisecond_a_token")


def test_of_a_running_request_only_whole_extents_are_kept():
    store = MemoryStore()
    rig = rig_of(store, extent_blocks=4)
    add(rig.core, 0, PROMPT, max_tokens=30, ignore_eos=True)
    while len(rig.outputs.get((0, 0), [])) < 20:
        rig.step(99)
    sizes = {len(extent) for extent in store.extents.values()}
    assert len(store.extents) == 60 // 16 and len(sizes) == 1


@pytest.mark.parametrize(("asynchronous", "every"), [(True, 8), (False, 8), (True, 1)])
def test_a_prompt_is_about_to_be_kept_before_its_first_token_leaves_the_engine(asynchronous, every, monkeypatch):
    """So another engine that continues it need not ask twice: chunk by chunk, beside another one, and aborted then."""
    monkeypatch.setattr(writer, "_EVERY", every)
    rig = rig_of(MemoryStore(), extent_blocks=2, max_num_batched_tokens=16, async_scheduling=asynchronous)
    add(rig.core, 0, PROMPT[:8], max_tokens=20, ignore_eos=True)
    add(rig.core, 1, PROMPT[1:], max_tokens=20, ignore_eos=True)
    for request_id, prompt in enumerate((PROMPT[:8], PROMPT[1:])):
        while not rig.outputs.get((request_id, 0)):
            rig.step()
        tier = rig.tiers.tiers[0]
        keys = list(rig.payloads(prompt))[1::2]
        assert len(keys) == len(prompt) // 8
        assert all(key in tier.queued or rig.tiers.coming(tier, key) for key in keys)
    rig.core.abort(1)
    rig.run()
    assert rig.tiers.tiers[0]._store.extents.keys() >= {*keys}


def test_a_prompt_is_kept_though_its_request_is_preempted_while_its_first_token_is_computed():
    """That token is its last one, and it never runs again.  Another request takes one of its blocks meanwhile."""
    store = FaultyStore()
    rig = rig_of(store, num_blocks=9, watermark=0.0, async_scheduling=True)
    add(rig.core, 0, PROMPT[:8], max_tokens=20, ignore_eos=True)
    for _ in range(3):
        rig.step()
    add(rig.core, 1, PROMPT[1:25], max_tokens=1, ignore_eos=True)
    while not rig.outputs.get((1, 0)):
        rig.step()
    assert rig.core.scheduler.num_preempted_total == 1
    tier, sound = rig.tiers.tiers[0], rig.payloads(PROMPT[1:25])
    assert sum(key in tier.queued or rig.tiers.coming(tier, key) for key in sound) == len(sound) - 1
    rig.hand.run(99)
    assert len(store.given) >= len(sound) - 1
    rig.run()
    sound |= rig.payloads(PROMPT[:8] + answer(PROMPT[:8], 20))
    assert store.given.items() <= sound.items()


def test_a_request_that_is_aborted_before_its_first_token_comes_leaves_nothing():
    store = MemoryStore()
    rig = rig_of(store, max_num_batched_tokens=32, async_scheduling=True)
    add(rig.core, 0, PROMPT[:40], max_tokens=4, ignore_eos=True)
    while not rig.core._launched:
        rig.step(9)
    assert rig.core._live[0][0].num_computed_tokens == 40, "its last chunk is in flight"
    rig.core.abort(0)
    add(rig.core, 1, [9], max_tokens=2, ignore_eos=True)
    rig.run()
    assert not store.extents


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
    hashes, tier = pool.hashes(request, 6), rig.tiers.tiers[0]
    announced = [rig.tiers.coming(tier, rig.tiers.seal.key_of(hashes[last])) for last in (3, 5)]
    assert announced == [True, num_kept == 2], "what will not be kept is not announced"
    listener.step_done(done_step(SchedulerOutput(), 1.0))
    assert len(rig.hand.tasks) == num_kept
    assert not any(rig.tiers.coming(tier, rig.tiers.seal.key_of(one)) for one in hashes), "it is queued"


def test_what_an_aborted_request_leaves_is_kept_though_no_step_follows():
    rig = rig_of(MemoryStore(), async_scheduling=False)
    add(rig.core, 0, PROMPT[:9], max_tokens=20, ignore_eos=True)
    while len(rig.outputs.get((0, 0), [])) < 5:
        rig.step()
    rig.hand.run(99)
    rig.core.abort(0)
    assert not rig.core.has_work and rig.hand.tasks


@pytest.mark.parametrize("ends", [True, False])
def test_what_the_last_request_leaves_is_kept_though_the_engine_ends_beside_a_step(ends):
    """Ended by a stop token, which a step launched ahead did not know of, or by the end of the engine."""
    store = MemoryStore()
    rig = rig_of(store, async_scheduling=True)
    said = answer(PROMPT, 11)  # the step in flight fills a block
    stops = [said[-1]] if ends else []
    add(rig.core, 0, PROMPT, max_tokens=40, ignore_eos=True, stop_token_ids=stops)
    while len(rig.outputs.get((0, 0), [])) < len(said):
        rig.step()
    assert rig.reasons == ({(0, 0): "stop"} if ends else {}) and rig.core.has_work
    with mock.patch.object(rig.tiers, "close", lambda: rig.hand.run(99)):
        worker._close(worker.Engine(rig.core, None))
    expect_kept(rig, store, said)


def expect_kept(rig: TieredRig, store: MemoryStore, said: list[int]) -> None:
    """All full blocks of the prompt and this part of its answer, and nothing behind them."""
    tokens = [*PROMPT, *said]
    assert [*rig.payloads(tokens[: len(tokens) // 4 * 4])][-1] in store.extents
    assert store.extents.keys() <= rig.payloads(tokens).keys()


class KVEventsOf:
    """KV events that only end."""

    def __init__(self, fails: bool = False) -> None:
        self.num_closed, self._fails = 0, fails

    def close(self) -> None:
        self.num_closed += 1
        if self._fails:
            raise OSError("the socket is gone")


def test_what_was_kept_is_written_though_the_owner_dies_beside_a_step():
    """Its pipe breaks before the engine hears of it; the tokens are lost, and the next engine reads the tiers."""
    store, events = MemoryStore(), KVEventsOf()
    rig = rig_of(store, async_scheduling=True)
    add(rig.core, 0, PROMPT, max_tokens=40, ignore_eos=True)
    while not (given := rig.outputs.get((0, 0), [])):
        rig.step()
    said = answer(PROMPT, 11)
    inbox: SimpleQueue = SimpleQueue()

    def sent(frame: bytes) -> None:
        message: Any = decode_to_frontend(frame)
        if isinstance(message, StepMessage):
            given.extend(token for delta in message.deltas for token in delta.token_ids)
        if given == said:
            inbox.put((frontend, Shutdown()))
            raise BrokenPipeError(32, "Broken pipe")

    frontend = Frontend(0, SimpleNamespace(send_bytes=sent))
    frontends = Frontends(rig.core.live_ids, EngineReady(256, 199, [0], 256, 4, "float32", "cpu", "fake", 0.1))
    frontends.join(frontend)
    with mock.patch.object(rig.tiers, "close", lambda: rig.hand.run(99)):
        engine = worker.Engine(rig.core, None, events)
        worker._serve_and_close(engine, frontends, inbox, Heartbeat(Heartbeat.create(8), 8))
    assert events.num_closed == 1
    expect_kept(rig, store, said)


@pytest.mark.parametrize("fails", ["a step", "KV events"])
def test_tiers_are_closed_whatever_fails_at_the_end(fails):
    store, events = MemoryStore(), KVEventsOf(fails == "KV events")
    rig = rig_of(store, async_scheduling=True)
    add(rig.core, 0, PROMPT, max_tokens=40, ignore_eos=True)
    while len(rig.outputs.get((0, 0), [])) < 3:
        rig.step()
    assert rig.core.has_work and not store.extents
    failing = (
        {"side_effect": RuntimeError("the device is lost")} if fails == "a step" else {"wraps": rig.runner.collect}
    )
    with (
        mock.patch.object(rig.runner, "collect", **failing),
        mock.patch.object(rig.tiers, "close", lambda: rig.hand.run(99)),
        nullcontext() if fails == "a step" else pytest.raises(OSError, match="the socket is gone"),
    ):
        worker._close(worker.Engine(rig.core, None, events))
    assert events.num_closed == 1 and store.extents


@pytest.mark.parametrize(("length", "num_kept"), [(12, 0), (16, 1), (27, 1)])
def test_a_short_part_of_an_extent_is_not_kept(length, num_kept):
    """Of less than a quarter: most turns of a chat would leave one, and no turn reads it again but the next."""
    store = MemoryStore()
    rig = rig_of(store, extent_blocks=16)
    serve(rig, 0, PROMPT[: length - 3], max_tokens=4)
    assert len(store.extents) == num_kept


def test_a_part_that_a_tier_has_lost_is_kept_again():
    store = MemoryStore()
    rig = rig_of(store, extent_blocks=16)
    serve(rig, 0, PROMPT)
    [key] = store.extents
    store.extents.clear()
    rig.new_core()  # nothing is cached
    serve(rig, 1, [*PROMPT, *answer(PROMPT, 8)], max_tokens=2)
    assert [*store.extents] == [key]


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
    assert not rig.tiers.coming.__self__._coming  # type: ignore[attr-defined]


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
    rig.new_core()  # nothing is cached
    serve(rig, 1, PROMPT)
    assert len(store.extents) == 12


@pytest.mark.parametrize("n", [1, 3])
def test_what_requests_share_is_computed_once(n):
    """Others find it in the prefix cache; so do the sequences of a request."""
    store = MemoryStore()
    rig = TieredRig(Info(num_blocks=256), 1, [store], second=True, **OPTIONS)
    for request_id in range(3):
        add(rig.core, request_id, [*PROMPT[:40], request_id], max_tokens=2, n=n, ignore_eos=True)
        rig.run()
    assert not store.extents
    rig.new_core()
    serve(rig, 9, PROMPT[:21])
    assert store.extents.keys() == rig.payloads(PROMPT[:20]).keys()


def test_what_a_preempted_request_gets_back_from_the_host_is_not_computed_twice():
    store = MemoryStore()
    info = Info(num_blocks=24, num_host_blocks=64)
    options = {**OPTIONS, "preemption_mode": "swap", "swap_space": "1MiB", "enable_prefix_caching": True}
    rig = TieredRig(info, 1, [store], second=True, **options)
    for request_id in range(4):
        add(rig.core, request_id, [request_id + 1, *PROMPT[:24]], max_tokens=30, ignore_eos=True)
    rig.run()
    assert rig.core.scheduler.swap.num_swapped_in and not store.extents


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


def stats_while_idle(rig: TieredRig) -> list[StepStats]:
    """The messages to the frontend of an idle engine, whose tiers' threads go on after the first second."""
    told, idle = list[StepStats](), 0

    def sent(frame: bytes) -> None:
        message: Any = decode_to_frontend(frame)
        if isinstance(message, StepMessage):
            told.append(message.stats)

    class Inbox(SimpleQueue):
        def get(self, *args: Any, **options: Any) -> Any:
            nonlocal idle
            idle += 1
            if idle > 3:
                return frontend, Shutdown()
            if idle == 2:
                rig.hand.run(99)
            raise Empty

    frontends = Frontends(rig.core.live_ids, EngineReady(256, 199, [0], 256, 4, "float32", "cpu", "fake", 0.1))
    frontend = Frontend(0, SimpleNamespace(send_bytes=sent))
    frontends.join(frontend)
    frontends.send_step(StepMessage([], rig.core.stats(SchedulerOutput(), 0.0)))
    worker.serve(worker.Engine(rig.core, None), frontends, Inbox(), Heartbeat(Heartbeat.create(8), 8))
    return told


def test_writes_that_end_after_the_last_step_are_counted_while_the_engine_is_idle():
    rig = rig_of(MemoryStore(), extent_blocks=4)
    add(rig.core, 0, PROMPT, max_tokens=8, ignore_eos=True)
    while rig.core.has_work:
        rig.step()
    counted = [stats.kv_tiers.tiers[0].stored_total for stats in stats_while_idle(rig)]
    assert counted == [0, rig.tiers.tiers[0].num_stored]  # what has not changed is not sent
    assert counted[-1]


@pytest.mark.parametrize("comes", [True, False])
def test_blocks_of_loads_that_end_after_their_request_return_while_the_engine_is_idle(comes):
    """Its client is gone, and no other request makes a step."""
    store = MemoryStore()
    serve(rig_of(store), 0, PROMPT)
    rig = rig_of(store)
    add(rig.core, 0, PROMPT, max_tokens=8, ignore_eos=True)
    rig.step()
    rig.step(1)
    begun = [rig.hand.tasks.popleft() for _ in range(2)]
    for future, _, _ in begun:  # threads have them, so they are not cancelled with the request
        assert future.set_running_or_notify_cancel()
    rig.core.abort(0)
    rig.step()
    for future, work, args in begun:
        rig.hand.submit(lambda future=future, work=work, args=args: future.set_result(comes and work(*args)))
    free = [stats.blocks_free for stats in stats_while_idle(rig)]
    assert free == [254, 256]
    assert not rig.tiers.loads and rig.tiers.num_hits == (8 if comes else 0)
