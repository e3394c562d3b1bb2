"""KV tiers in the engine: the rest of an answer that another server began asks them again."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from engine_rig import add
from kv_memory import MemoryStore
from tier_conversations import PROMPT, answer, rig_of, serve, stored
from tiers_rig import TieredRig

from inflight.engine.attached import Attached
from inflight.engine.policies import tier_admission

# Computing 41 tokens takes 2.05 s, and tiers are asked again for 0.2; a step takes a millisecond.
pytestmark = pytest.mark.usefixtures("fifty_milliseconds_a_token")


@pytest.fixture
def fifty_milliseconds_a_token(monkeypatch):
    monkeypatch.setattr(tier_admission, "_UNMEASURED_SECONDS", 5e-2)


class CountingStore(MemoryStore):
    """Attributes:
    num_finds: questions for extents so far.
    """

    def __init__(self, extents: dict[bytes, bytes] | None = None) -> None:
        super().__init__()
        self.extents = dict(extents or {})
        self.num_finds = 0

    def find(self, keys):
        self.num_finds += 1
        return super().find(keys)


def add_rest(
    rig: TieredRig, request_id: int = 0, prompt: list[int] = PROMPT, resumed: bool = True, given: int = 1
) -> None:
    """`resumed` False: replayed after the engine process died; it has so many tokens of four or more."""
    fields: dict[str, Any] = {"output_token_ids": [answer(prompt, given)], "attached": Attached(resumed=resumed)}
    most = max(4, given + 1)
    add(rig.core, request_id, prompt, {**fields, "replayed": not resumed}, max_tokens=most, ignore_eos=True)


def steps_until_it_starts(rig: TieredRig, limit: int = 3000) -> int:
    for steps in range(limit):
        if rig.outputs:
            return steps
        rig.step(99)
    raise AssertionError(f"it waits after {limit} steps")


def half_of(store: MemoryStore) -> dict[bytes, bytes]:
    """The first five of ten extents of a block."""
    return {key: store.extents[key] for key in list(rig_of(store).payloads(PROMPT))[:5]}


@pytest.mark.parametrize("resumed", [True, False])
def test_what_comes_later_is_found_by_who_was_resumed_and_not_by_who_was_replayed(resumed):
    store = CountingStore()
    rig = rig_of(store)
    add_rest(rig, resumed=resumed)
    for _ in range(30):
        rig.step(99)
    store.extents.update(stored().extents)
    rig.run()
    assert rig.outputs[0, 0] == answer(PROMPT, 4)[1:]
    assert rig.tiers.num_hits == (40 if resumed else 0)
    assert store.num_finds == (3 if resumed else 1), "after 20 ms, then after 40 more"


@pytest.mark.parametrize(("a_token", "shortest", "longest"), [(1e-2, 40, 50), (5e-2, 200, 220), (10.0, 500, 520)])
def test_it_waits_for_a_tenth_of_the_time_to_compute_and_half_a_second_at_most(a_token, shortest, longest):
    rig = rig_of(MemoryStore())
    with mock.patch.object(tier_admission, "_UNMEASURED_SECONDS", a_token):
        add_rest(rig)
        assert shortest <= steps_until_it_starts(rig) <= longest


@pytest.mark.parametrize(("given", "waits"), [(1, True), (16, True), (17, False), (22, False)])
def test_an_answer_that_began_long_ago_waits_for_nothing(given, waits):
    """As one whose server died: what its engine has of the prompt was stored with the first token."""
    rig = rig_of(store := CountingStore())
    add_rest(rig, given=given)
    assert (steps_until_it_starts(rig) > 100) == waits
    assert (store.num_finds > 1) == waits


def test_a_replayed_request_waits_for_nothing():
    rig = rig_of(MemoryStore())
    add_rest(rig, resumed=False)
    assert steps_until_it_starts(rig) <= 4


def test_who_was_preempted_waits_for_nothing():
    rig = rig_of(MemoryStore())
    add_rest(rig)
    [request] = rig.core.scheduler.waiting
    request.num_preemptions = 1
    assert steps_until_it_starts(rig) <= 4


def test_loads_of_what_was_found_begin_while_the_rest_is_asked_for():
    """And the tenth is that of the rest: of 21 tokens."""
    store = CountingStore(half_of(stored()))
    rig = rig_of(store)
    add_rest(rig)
    rig.step()
    rig.step(1)
    assert len(rig.tiers.loads) == 5
    assert 90 <= steps_until_it_starts(rig) <= 110
    rig.run()
    assert rig.tiers.num_hits == 20
    assert rig.outputs[0, 0] == answer(PROMPT, 4)[1:]


def test_the_second_half_is_loaded_behind_the_first_one():
    full = stored()
    store = CountingStore(half_of(full))
    rig = rig_of(store)
    add_rest(rig)
    for _ in range(10):
        rig.step(99)
    assert rig.tiers.num_hits == 20 and not rig.outputs
    store.extents.update(full.extents)
    assert steps_until_it_starts(rig) <= 30
    assert rig.tiers.num_hits == 40


def test_a_part_of_an_extent_is_not_loaded_until_it_is_certain_that_the_whole_one_does_not_come():
    """The store has one and a half extents of two blocks: the second one is whole later, or never."""
    for comes in (True, False):
        store = CountingStore()
        serve(rig_of(store, extent_blocks=2), 0, PROMPT[:13], max_tokens=1)
        assert len(store.extents) == 2
        rig = rig_of(store, extent_blocks=2)
        add_rest(rig)
        for _ in range(10):
            rig.step(99)
        assert rig.tiers.num_hits == 8
        store.extents.update(stored(extent_blocks=2).extents if comes else {})
        rig.run()
        assert rig.tiers.num_hits == (40 if comes else 12)
        assert rig.outputs[0, 0] == answer(PROMPT, 4)[1:]


@pytest.mark.parametrize("num_left", [0, 2])
def test_a_load_that_is_lost_ends_the_asking(num_left):
    store = CountingStore(half_of(stored()))
    rig = rig_of(store)
    add_rest(rig)
    while not rig.tiers.loads:
        rig.step(1)
    store.extents = dict(list(store.extents.items())[:num_left])
    rig.step(3, last_first=True)
    assert steps_until_it_starts(rig) <= 6
    assert rig.tiers.num_hits == 4 * num_left


def test_fifty_that_find_nothing_do_not_ask_with_every_step():
    store = CountingStore()
    rig = rig_of(store, max_num_seqs=64)
    for request_id in range(50):
        add_rest(rig, request_id, [*PROMPT[:40], request_id % 9])
    for _ in range(20):
        rig.step(99)
    assert len(rig.core.scheduler.held) == 50
    assert store.num_finds <= 50
    for _ in range(180):
        rig.step(99)
    assert store.num_finds <= 4 * 50, "after 20, 60 and 140 ms"


def test_the_engines_thread_waits_for_no_answer_but_the_first(monkeypatch):
    waits = []
    monkeypatch.setattr(tier_admission, "wait", lambda answers, seconds: waits.append(seconds))
    store = CountingStore()
    rig = rig_of(store)
    monkeypatch.setattr(rig.tiers.tiers[0].__class__, "finds_at_once", True)
    add_rest(rig)
    for _ in range(50):
        rig.step(99)
    assert store.num_finds >= 2
    assert len(waits) <= 2, "one for the step in which it asks, and one for that in which it reads the answer"


def test_a_tier_that_tells_what_is_about_to_come_is_asked_once():
    """As a peer does: it has nothing, so the rest starts at once, and what comes later is not looked for."""
    rig = rig_of(store := CountingStore())
    rig.tiers.tiers[0].is_shared = False
    add_rest(rig)
    assert steps_until_it_starts(rig) <= 4
    store.extents.update(stored().extents)
    rig.run()
    assert store.num_finds == 1 and rig.tiers.num_hits == 0
    assert rig.outputs[0, 0] == answer(PROMPT, 4)[1:]


def test_tiers_that_no_other_writes_are_not_asked_again():
    host, peer = CountingStore(), CountingStore()
    rig = rig_of(host, peer)
    rig.tiers.tiers[0].is_shared = False
    add_rest(rig)
    for _ in range(30):
        rig.step(99)
    assert host.num_finds == 2, "before the peer, and after it"
    peer.extents.update(stored().extents)
    rig.run()
    assert rig.tiers.num_hits == 40 and peer.num_finds == 3 and host.num_finds == 2


@pytest.mark.parametrize("why", ["host", "closed"])
def test_who_can_ask_nobody_again_starts(why):
    rig = rig_of(MemoryStore())
    tier = rig.tiers.tiers[0]
    if why == "host":
        tier.is_shared = False
    else:
        rig.step()
    add_rest(rig)
    if why == "closed":
        for _ in range(3):
            rig.step(99)
        assert not rig.outputs
        tier._reads.off_until = rig.now + 30
    assert steps_until_it_starts(rig) <= 25
