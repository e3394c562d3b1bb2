"""KV tiers in the engine: how long requests wait, and what loads cost others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from drafters import add_gate
from engine_rig import Info, add, done_step
from kv_memory import MemoryStore
from tier_conversations import OPTIONS, PROMPT, answer, from_tiers, rig_of, serve, stored
from tiers_rig import TieredRig

from inflight.engine.policies import tier_admission
from inflight.engine.step import SchedulerOutput

pytestmark = pytest.mark.usefixtures("half_a_millisecond_a_token")


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


def test_beside_running_requests_loads_take_six_hundredths_of_a_core():
    """Nine extents, each 0.3 ms of a core; a step takes a millisecond."""
    rig = rig_of(stored(PROMPT[:36]), cpu_seconds=3e-4)
    add(rig.core, 1, [5], max_tokens=60, ignore_eos=True)
    rig.step()
    add(rig.core, 0, PROMPT[:37], max_tokens=4, ignore_eos=True)
    loaded = []
    with mock.patch.object(tier_admission, "_UNMEASURED_SECONDS", 3e-3):  # 108 ms to compute; 45 at this pace
        while (0, 0) not in rig.outputs:
            rig.step(99)
            loaded.append(rig.tiers.tiers[0].num_loaded)
    assert rig.tiers.num_hits == 36
    per_step = [after - before for before, after in itertools.pairwise(loaded)]
    assert max(per_step) == 1 and max(sum(per_step[n : n + 10]) for n in range(len(per_step))) == 3
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


def test_a_request_whose_extents_are_on_their_way_asks_no_tier():
    """But for what it wants beyond that."""
    store = stored([*PROMPT, 8, 8, 8, 8])
    rig = rig_of(store, max_num_seqs=16)
    add(rig.core, 0, PROMPT, max_tokens=4, ignore_eos=True)
    rig.step()
    rig.step(1)
    assert len(rig.tiers.loads) == 10
    store.asked.clear()
    for request_id in range(1, 8):
        add(rig.core, request_id, [*PROMPT[:40], request_id], max_tokens=4, ignore_eos=True)
    add(rig.core, 8, [*PROMPT, 8, 8, 8, 8], max_tokens=4, ignore_eos=True)
    rig.step()
    assert len(rig.core.scheduler.held) == 9
    assert [work.__name__ for _, work, _ in rig.hand.tasks] == ["_load"] * 10 + ["_find"]
    rig.run()
    assert len(rig.reasons) == 9 and rig.tiers.num_hits == 44 and rig.tiers.tiers[0].num_loaded == 11
    assert all(rig.outputs[n, 0] == answer([*PROMPT[:40], n], 4) for n in range(1, 8))


def test_an_extent_that_came_before_those_ahead_of_it_is_not_loaded_again():
    """The second request has its answer when half of the first one's loads are done, the last ones first."""
    rig = rig_of(stored())
    for request_id in range(2):
        add(rig.core, request_id, [*PROMPT[:40], request_id], max_tokens=4, ignore_eos=True)
    rig.step()
    rig.step(1)
    assert len(rig.tiers.loads) == 10 and len(rig.hand.tasks) == 11
    rig.step(5, last_first=True)
    rig.step(1)
    assert len(rig.tiers.loads) == 5 and len(rig.core.scheduler.held) == 2
    rig.run()
    assert rig.tiers.num_hits == 40 and rig.tiers.tiers[0].num_loaded == 10
    assert all(rig.outputs[n, 0] == answer([*PROMPT[:40], n], 4) for n in range(2))


def test_a_long_step_earns_loads_no_more_than_a_few_milliseconds():
    rig = rig_of(stored(), cpu_seconds=3e-4)
    add(rig.core, 1, [5], max_tokens=60, ignore_eos=True)
    rig.step()
    rig.now += 1.0
    rig.step()
    assert from_tiers(rig)._loads._left == pytest.approx(5e-3)


def test_loads_that_the_usual_share_would_make_too_late_hurry():
    """Nine extents, each 1 ms of a core, and the engine has a quarter of one: 0.6 s at the usual share.  Computing
    takes 0.36 s, and would hold up the running request as long."""
    rig = rig_of(stored(PROMPT[:36]), cpu_seconds=1e-3)
    rig.tiers.cpu_clock = lambda: 0.25 * rig.now
    loads, shares = from_tiers(rig)._loads, []
    add(rig.core, 1, [5], max_tokens=80, ignore_eos=True)
    with mock.patch.object(tier_admission, "_UNMEASURED_SECONDS", 1e-2):
        for number in range(60):
            if number == 10:
                add(rig.core, 0, PROMPT[:37], max_tokens=4, ignore_eos=True)
            rig.now += 0.01
            rig.step(99)
            shares.append(loads._share)
    assert rig.outputs[0, 0] == answer(PROMPT[:37], len(rig.outputs[0, 0])) and rig.tiers.num_hits == 36
    assert min(shares) == 0.06 < max(shares) <= 0.5
    assert shares[:10] == [0.06] * 10 and shares[-1] == 0.06


@pytest.mark.parametrize("number", [0, 1, 5])
def test_an_extent_that_takes_a_core_long_does_not_end_a_load(number):
    """Of nine that take 0.3 ms of a core one takes 10, as the first one that touches new pages does.  All at the pace
    take 45 ms, computing them 108; nine like that one would take 1.5 s."""
    rig = rig_of(stored(PROMPT[:36]), cpu_seconds=3e-4)
    took = [3e-4] * 9
    took[number] = 1e-2
    rig.tiers.tiers[0]._cpu_clock = itertools.accumulate(itertools.chain(*zip(itertools.repeat(0.0), took))).__next__
    assert loaded_beside_a_stream(rig) == 36


@pytest.mark.parametrize("number", [0, 1, 2, 5])
def test_a_late_step_does_not_end_a_load(number):
    """It takes 30 ms, in which the engine has no core.  If all did, the nine extents would come too late."""
    rig = rig_of(stored(PROMPT[:36]), cpu_seconds=3e-4)
    late = 0.0
    rig.tiers.cpu_clock = lambda: rig.now - late

    def before(step: int) -> None:
        nonlocal late
        if step == number:
            rig.now, late = rig.now + 0.03, 0.03

    assert loaded_beside_a_stream(rig, before) == 36


def loaded_beside_a_stream(rig: TieredRig, before: Callable[[int], None] = lambda step: None) -> int:
    """Tokens of the 36 of a prompt, whose computing takes 108 ms."""
    add(rig.core, 1, [5], max_tokens=99, ignore_eos=True)
    for _ in range(10):
        rig.step()
    add(rig.core, 0, PROMPT[:37], max_tokens=4, ignore_eos=True)
    with mock.patch.object(tier_admission, "_UNMEASURED_SECONDS", 3e-3):
        for step in range(99):
            if (0, 0) in rig.outputs:
                break
            before(step)
            rig.step(99)
    assert rig.outputs[0, 0] == answer(PROMPT[:37], len(rig.outputs[0, 0]))
    return rig.tiers.num_hits


def test_conversations_that_return_together_do_not_all_wait_for_a_pace_that_serves_a_few():
    """Each has nine extents, at 1.8 ms of a core: 32 ms at half a core, the most, and computing one takes 72, or 144
    behind another one.  Here it takes no time at all, so that others are given up as soon as one is computed."""
    prompts = [[n + 1, *PROMPT[1:36]] for n in range(8)]
    store = MemoryStore()
    for prompt in prompts:
        serve(rig_of(store), 0, prompt)
    rig = rig_of(store, max_num_seqs=16, cpu_seconds=1.8e-3)
    add(rig.core, 99, [5], max_tokens=60, ignore_eos=True)
    rig.step()
    for request_id, prompt in enumerate(prompts):
        add(rig.core, request_id, [*prompt, 3], max_tokens=4, ignore_eos=True)
    with mock.patch.object(tier_admission, "_UNMEASURED_SECONDS", 2e-3 / 0.6):
        for _ in range(5):
            rig.step(99)
        assert len(rig.core.scheduler.held) == 3
        rig.run()
    assert rig.tiers.num_hits == 3 * 36
    assert all(rig.outputs[n, 0] == answer([*prompts[n], 3], 4) for n in range(8))


def test_requests_that_share_a_prefix_wait_for_its_loads_as_one_does():
    """As above, but all want the same nine extents."""
    prompt = [9, *PROMPT[1:36]]
    rig = rig_of(stored(prompt), max_num_seqs=16, cpu_seconds=1.8e-3)
    add(rig.core, 99, [5], max_tokens=60, ignore_eos=True)
    rig.step()
    for request_id in range(8):
        add(rig.core, request_id, [*prompt, request_id], max_tokens=4, ignore_eos=True)
    with mock.patch.object(tier_admission, "_UNMEASURED_SECONDS", 2e-3 / 0.6):
        for _ in range(5):
            rig.step(99)
        assert len(rig.core.scheduler.held) == 8
        rig.run()
    assert rig.tiers.num_hits == 36


def test_who_has_all_its_loads_waits_for_them_alone():
    """A request before it comes to want more, and its loads begin later."""
    long, short = [1, *PROMPT[1:36]], [2, *PROMPT[1:8]]
    store = stored(long)
    serve(rig_of(store), 0, short, max_tokens=1)
    rig = rig_of(store, cpu_seconds=3e-4)
    add(rig.core, 99, [5], max_tokens=60, ignore_eos=True)
    rig.step()
    with mock.patch.object(tier_admission, "_UNMEASURED_SECONDS", 2e-3 / 0.6):
        add(rig.core, 0, [*long, 3], max_tokens=4, ignore_eos=True)
        add(rig.core, 1, [*short, 3], max_tokens=4, ignore_eos=True)
        rig.step()
        rig.step(1, last_first=True)
        while len(rig.tiers.loads) < 2:
            rig.step()
        rig.step(1)
        assert len(rig.core.scheduler.held) == 2 and len(rig.tiers.loads) == 2
        rig.run()
    assert rig.tiers.num_hits == 36 + 8


def test_a_load_that_has_begun_is_waited_for_though_another_one_exceeds_the_pace():
    """It began while nothing ran.  Beside a request, an extent of four blocks takes 12 ms at the pace; computing the
    one block of the first request takes 8."""
    long, short = [1, *PROMPT[1:36]], [2, *PROMPT[1:4]]
    store = stored(long, extent_blocks=4)
    serve(rig_of(store, extent_blocks=4), 0, short, max_tokens=1)
    rig = rig_of(store, extent_blocks=4, cpu_seconds=1.2e-3)
    with mock.patch.object(tier_admission, "_UNMEASURED_SECONDS", 2e-3):
        add(rig.core, 1, [*short, 3], max_tokens=4, ignore_eos=True)
        rig.step()
        rig.step(1)
        assert len(rig.tiers.loads) == 1
        add(rig.core, 99, [5], max_tokens=60, ignore_eos=True)
        rig.step()
        add(rig.core, 0, [*long, 3], max_tokens=4, ignore_eos=True)
        rig.step()
        rig.step(1, last_first=True)
        assert len(rig.tiers.loads) == 2 and from_tiers(rig)._loads._left < -1e-3
        rig.step()
        assert len(rig.core.scheduler.held) == 2
        rig.run()
    assert rig.outputs[1, 0] == answer([*short, 3], 4)


def test_no_more_than_so_many_requests_wait(monkeypatch):
    monkeypatch.setattr(tier_admission, "_MOST_WAITING", 2)
    rig = rig_of(stored())
    for request_id in range(4):
        add(rig.core, request_id, [*PROMPT[:40], request_id], max_tokens=4, ignore_eos=True)
    rig.step()
    assert len(rig.core.scheduler.held) == 2
    rig.run()
    assert len(rig.reasons) == 4


def test_a_request_that_starts_is_not_looked_for_any_more():
    store = stored()
    rig = rig_of(store)
    add(rig.core, 0, PROMPT, max_tokens=4, ignore_eos=True)
    rig.step()
    rig.core.abort(0)
    rig.hand.run(99)
    assert not store.asked


def test_a_tier_with_more_questions_than_it_answers_in_time_is_not_asked():
    rig = rig_of(stored(), max_num_seqs=16)
    rig.tiers.tiers[0]._find_seconds = 0.03  # computing takes 20 ms: every second one is, while it answers the other
    for request_id in range(8):
        add(rig.core, request_id, [1 + request_id, *PROMPT[:40]], max_tokens=4, ignore_eos=True)
    rig.step()
    assert sum(work == rig.tiers.tiers[0]._find for _, work, _ in rig.hand.tasks) == 4
    assert len(rig.core.scheduler.held) == 4
    rig.run()
    assert len(rig.reasons) == 8


def test_a_tier_whose_answers_take_longer_than_computing_is_seldom_asked():
    """Each request would wait as long as computing takes, for no answer."""
    store = stored()
    rig = rig_of(store)
    rig.tiers.tiers[0]._find_seconds = 0.03  # of the 20 ms that computing takes, 16 are worth waiting
    asked = []
    for request_id in range(60):
        add(rig.core, request_id, [*PROMPT[:40], request_id % 9], {"cache_salt": str(request_id)}, max_tokens=1)
        rig.step()
        asked.append(len(rig.core.scheduler.held))
        rig.now += 0.1
        rig.run()
    assert sum(asked[:32]) == 0 and asked[32] == 1  # 0.98 ** 32 of 30 ms


def test_where_nothing_runs_loads_take_all_there_is():
    rig = rig_of(stored(), cpu_seconds=3e-4)
    add(rig.core, 0, PROMPT, max_tokens=4, ignore_eos=True)
    for _ in range(4):  # asked, begun, adopted
        rig.step(99)
    assert rig.tiers.num_hits == 40


def test_loads_that_would_take_a_core_too_long_beside_others_are_not_waited_for():
    """Ten extents at 1 ms: 20 ms at half a core, the most, and computing them takes 20."""
    rig = rig_of(stored(), cpu_seconds=1e-3)
    add(rig.core, 1, [5], max_tokens=60, ignore_eos=True)
    rig.step()
    add(rig.core, 0, PROMPT, max_tokens=4, ignore_eos=True)
    for _ in range(4):
        rig.step(99)
    assert rig.outputs[0, 0]


def test_a_slow_tier_is_not_waited_for():
    rig = rig_of(stored())
    rig.tiers.tiers[0]._extent_seconds = 0.01  # 10 extents: 50 ms, and computing them takes 20
    add(rig.core, 0, PROMPT, max_tokens=4, ignore_eos=True)
    for _ in range(3):
        rig.step(1)
    assert rig.outputs[0, 0]


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


def computed_steps(*chunks: tuple[int, int], drafts: int = 0) -> tier_admission.TierAdmission:
    """An engine's admission after steps with a row in one slot: tokens before it, tokens that took 1 ms each."""
    policy = from_tiers(rig_of(MemoryStore()))
    for done, num in chunks:
        out = SchedulerOutput(num_prompt_tokens=0 if drafts else num)
        out.append(0, num, done, True)
        out.draft_token_ids = {0: [1] * drafts} if drafts else {}
        policy.step_done(done_step(out, num * 1e-3))
    return policy


@pytest.mark.parametrize("chunks", [[(7992, 8)], [(7900, 90)], [(48, 40)], [(40, 30), (96, 50)]])
def test_a_prompt_that_was_found_does_not_tell_what_computing_it_takes(chunks):
    assert computed_steps(*chunks)._compute_seconds(0, 2000) == 8000 * 5e-4


def test_drafts_do_not_tell_what_computing_a_prompt_takes():
    assert computed_steps(*[(8000 + 5 * n, 5) for n in range(8)], drafts=4)._compute_seconds(0, 2000) == 8000 * 5e-4
    assert computed_steps(*[(70 * n, 70) for n in range(8)], drafts=69)._compute_seconds(0, 20) == 80 * 5e-4


def test_chunks_of_a_prompt_tell_what_computing_it_takes():
    policy = computed_steps(*[(20 + 32 * n, 32) for n in range(30)])
    assert policy._compute_seconds(0, 200) == pytest.approx(0.8, rel=0.05)
    assert policy._longest == 20 + 30 * 32


def test_a_conversation_that_came_from_a_tier_does_not_tell_what_computing_it_takes():
    store = MemoryStore()
    for turn in range(2):
        rig = TieredRig(Info(max_model_len=200, num_blocks=64), 1, [store], **OPTIONS)
        add(rig.core, turn, [1 + n % 7 for n in range(101)], max_tokens=2, ignore_eos=True)
        rig.run()
    assert rig.tiers.num_hits == 100
    assert from_tiers(rig)._compute_seconds(0, 25) == 100 * 5e-4
