"""Which adapters are in memory: room, the ones used last, and no starvation; without a model."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

import pytest
from engine_rig import Info, add, make_core
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.adapters.spec import AdapterError
from inflight.engine.adapter import AdapterRef, Outcome
from inflight.engine.attached import Attached
from inflight.engine.integrity import check_core
from inflight.engine.policies.adapter_admission import AdapterAdmission
from inflight.runner.adapters import AdapterTable, Entry


class Table(AdapterTable):
    """Loads when it is told to, on a clock that is set."""

    def __init__(self, limit: int, max_running: int | None = None) -> None:
        super().__init__(None, limit, 16, max_running, clock=lambda: self.now)  # type: ignore[arg-type]
        self.now = 0.0
        self.loading: list[Entry] = []

    def _submit(self, entry: Entry) -> None:
        self.loading.append(entry)

    def asks(self, ref: AdapterRef, request: Any = None, begun: bool = False) -> Outcome:
        return self.outcome(ref, request, begun)

    def finish(self, failure: str = "") -> None:
        entry = self.loading.pop(0)
        if failure:
            entry.loaded.set_exception(AdapterError(failure))
        else:
            entry.packed = entry.ref.id
            entry.loaded.set_result({"bytes": 8, "name": entry.ref.name, "seconds": 0.5})

    def loads(self, ref: AdapterRef) -> None:
        self.start(ref)
        while self.loading:
            self.finish()
        assert self.asks(ref) == READY

    def after(self, seconds: float) -> Table:
        self.now += seconds
        return self


def ref_of(name: str) -> AdapterRef:
    return AdapterRef(name, f"id of {name}", "/nowhere", 4)


A, B, C, D, E = map(ref_of, "abcde")
READY, WAITS = Outcome(True), Outcome(False)


def test_the_one_that_was_used_longest_ago_leaves() -> None:
    table = Table(limit=2)
    table.loads(A)
    table.after(1).loads(B)
    assert table.after(1).asks(A) == READY
    table.after(1).loads(C)
    assert [table.get(one.id) is not None for one in (A, B, C)] == [True, False, True]


def test_one_that_runs_stays_and_others_wait() -> None:
    table = Table(limit=1)
    table.loads(A)
    table.hold(A)
    assert table.after(9).asks(B) == WAITS and not table.loading
    table.release(A)
    assert table.after(9).asks(B) == WAITS and table.loading[0].ref == B
    table.finish()
    assert table.asks(B) == READY and table.get(A.id) is None


def test_one_that_was_asked_for_a_moment_ago_waits_for_its_slot() -> None:
    table = Table(limit=1)
    table.loads(A)
    assert table.after(0.1).asks(B) == WAITS and not table.loading
    assert table.asks(A) == READY
    for _ in range(30):
        table.after(0.1).asks(A)
        if table.asks(B) == WAITS and table.loading:
            break
    assert table.loading[0].ref == B, "but not for ever"


def test_a_stream_of_one_adapter_does_not_starve_another() -> None:
    table = Table(limit=2)
    table.loads(A)
    table.hold(A)
    table.after(1).loads(B)
    table.hold(B)
    for _ in range(25):
        assert table.after(0.1).asks(C) == WAITS
    assert table.asks(A) == WAITS, "A started last the longest ago, and starts no more requests"
    assert table.asks(A, begun=True) == READY and table.asks(B) == READY
    table.release(A)
    assert table.asks(C) == WAITS and table.loading[0].ref == C
    table.finish()
    assert table.asks(C) == READY
    table.hold(C)
    assert table.after(5).asks(A) == WAITS and not table.loading


def test_one_more_drains_while_the_first_one_does_not_end() -> None:
    table = Table(limit=3)
    for one in (A, B, D):
        table.after(0.01).loads(one)
        table.hold(one)
    assert table.asks(C) == WAITS
    for drained in range(4):
        assert [table.asks(one) for one in (A, B, D)] == [*[WAITS] * drained, *[READY] * (3 - drained)]
        for _ in range(8):
            table.after(0.25).asks(C)
    table.release(B)
    assert table.asks(C) == WAITS and table.loading[0].ref == C


def test_who_no_longer_waits_stops_nothing() -> None:
    table = Table(limit=1)
    table.loads(A)
    table.hold(A)
    for _ in range(25):
        table.after(0.1).asks(B)
    assert table.after(3).asks(A) == WAITS, "a step can take long"
    table.forget(B)
    assert table.asks(A) == READY, "B's request was aborted"


def test_who_is_far_back_in_the_queue_stops_nothing() -> None:
    table = Table(limit=1)
    table.loads(A)
    table.hold(A)
    table.start(B)
    assert table.after(3).asks(A) == READY


def test_who_is_far_back_in_the_queue_waits_for_no_slot() -> None:
    table = Table(limit=3, max_running=1)
    table.loads(A)
    table.hold(A)
    table.start(B)
    table.finish()
    table.start(B)
    assert table.after(3).asks(A) == READY


def test_who_was_passed_by_others_stops_nothing() -> None:
    table = Table(limit=1)
    table.loads(A)
    table.hold(A)
    table.asks(B)
    assert table.after(29).asks(A) == WAITS
    assert table.after(1).asks(A) == READY
    table.asks(B)
    table.after(31).asks(B)
    assert table.asks(A) == READY, "B's wait begins anew"


def test_those_in_memory_take_turns_in_the_slots_of_a_gpu() -> None:
    """One that waits for a slot makes the one drain that started last the longest ago, and is not loaded again."""
    table = Table(limit=3, max_running=1)
    table.loads(A)
    table.hold(A)
    table.after(1).start(B)
    table.finish()
    assert table.asks(B) == WAITS and table.get(B.id) is not None, "loaded, but A has the slot"
    assert table.asks(A) == READY, "more requests with A may start at first"
    assert table.after(1.9).asks(A) == READY
    assert table.after(0.2).asks(A) == WAITS and table.asks(A, begun=True) == READY
    assert table.asks(B) == WAITS
    table.release(A)
    assert table.asks(B) == READY
    table.hold(B)
    assert table.asks(A) == WAITS and not table.loading
    table.release(B)
    assert table.asks(A) == READY


def test_a_free_slot_is_for_one_of_those_that_wait() -> None:
    table = Table(limit=5, max_running=2)
    for one in (A, B):
        table.loads(one)
        table.hold(one)
    for one in (C, D, E):
        table.start(one)
        table.finish()
    assert [table.after(0.1).asks(one) for one in (C, D, E)] == [WAITS] * 3
    table.release(A)
    for _ in range(30):
        assert [table.after(0.1).asks(one) for one in (C, D, E, A)] == [READY, *[WAITS] * 3]
    table.hold(C)
    assert [table.asks(one) for one in (D, E)] == [WAITS] * 2
    table.release(B)
    assert [table.asks(one) for one in (D, E)] == [READY, WAITS]
    table.forget(D)
    assert [table.asks(one) for one in (E, D)] == [READY, WAITS], "D's request was aborted"


def test_a_slot_is_not_kept_for_one_that_was_passed_by_others() -> None:
    table = Table(limit=2, max_running=1)
    for one in (A, B):
        table.start(one)
        table.finish()
    assert [table.asks(one) for one in (A, B)] == [READY, WAITS]
    assert table.after(1.9).asks(B) == WAITS
    assert [table.after(0.2).asks(one) for one in (B, A)] == [READY, WAITS]


def _order_of_starts(names: str, served: str = "", **config: Any) -> list[int]:
    """Request 1 has the promise of the only slot, and waits for the blocks of request 0, which has no adapter.

    Request 2, with another adapter, is the shortest, the most urgent and due first.

    Args:
        names: of the tenants of the three.
        served: a tenant that has had a request before.
    """
    table = Table(limit=4, max_running=1)
    core = make_core(
        Info(num_blocks=16, adapters=table),
        clock=lambda: table.now,
        enable_lora=True,
        block_size=4,
        enable_prefix_caching=False,
        **config,
    )
    started: list[int] = []

    def step() -> None:
        started.extend(one.request_id for one in core.step().deltas if one.request_id not in started)
        check_core(core)
        table.after(0.01)

    if served:
        add(core, 9, [3] * 5, {"tenant": served}, max_tokens=4, ignore_eos=True)
        while core.has_work:
            step()
        started.clear()
    add(core, 0, [3] * 30, {"priority": -9, "tenant": names[0]}, max_tokens=20, ignore_eos=True)
    step()
    for number, length, priority, ref in ((1, 40, 5, A), (2, 4, 1, B)):
        choices = {"attached": Attached(adapter=ref), "priority": priority, "deadline": 60.0 * (3 - number)}
        choices["tenant"] = names[number]
        add(core, number, [3] * length, choices, max_tokens=9 // number, ignore_eos=True)
        table.finish()
        step()
        assert number == 2 or list(table._promised) == [A.id]
    while core.has_work:
        step()
    assert not table._promised
    return started


@pytest.mark.parametrize("config", [{}, {"tenants": {"*": {"per_name": True}}}], ids=["", "fair shares"])
@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", [0, 1, 2]), ("priority", [0, 2, 1]), ("sjf", [0, 2, 1]), ("edf", [0, 2, 1])]
)
def test_who_lacks_blocks_keeps_no_slot_from_one_that_goes_before_it(
    policy: str, order: list[int], config: dict[str, Any]
) -> None:
    assert _order_of_starts("xyy", scheduling_policy=policy, **config) == order


@pytest.mark.parametrize(
    ("names", "served", "caps", "order"),
    [
        ("xyz", "y", {}, [0, 2, 1]),
        ("xyz", "z", {}, [0, 1, 2]),
        ("xyx", "y", {"x": {"max_running": 1}}, [0, 1, 2]),
    ],
)
def test_a_slot_is_for_the_tenant_that_is_next(names: str, served: str, caps: dict[str, Any], order: list[int]) -> None:
    """`served` has had tokens; the other two that wait have had none."""
    assert _order_of_starts(names, served, tenants={"*": {"per_name": True}, **caps}) == order


def test_a_request_of_the_same_rank_takes_no_promise() -> None:
    table = Table(limit=2, max_running=1)
    table.reset(lambda request, other: request < other)
    for one in (A, B):
        table.start(one)
        table.finish()
    assert table.asks(A, request=2) == READY
    assert table.asks(B, request=2) == WAITS
    assert table.asks(B, request=1) == READY
    assert table.asks(A, request=2) == WAITS
    table.hold(B)
    assert table.asks(A, request=0) == WAITS, "B runs"


def test_a_promise_is_of_the_request_that_goes_first() -> None:
    """Of the adapter's requests, whichever asked last; but not of one that has ended."""
    table = Table(limit=2, max_running=1)
    table.reset(lambda request, other: request < other)
    for one in (A, B):
        table.start(one)
        table.finish()
    assert [table.asks(A, request=number) for number in (1, 3)] == [READY] * 2
    assert table.asks(B, request=2) == WAITS
    for _ in range(3):
        assert table.after(0.9).asks(A, request=3) == READY
    assert table.asks(B, request=2) == READY


def test_requests_that_wait_for_a_slot_start_in_turn_and_within_a_minute() -> None:
    """Each runs for 22 s.  A slot that another one gets does not prolong a request's wait."""
    table = Table(limit=6, max_running=1)
    core = make_core(Info(adapters=table), clock=lambda: table.now, enable_lora=True)
    for number in range(6):
        ref = ref_of(str(number))
        add(core, number, [3] * 5, {"attached": Attached(adapter=ref)}, max_tokens=44, ignore_eos=True)
        table.finish()
    started: dict[int, float] = {}
    failed: dict[int, float] = {}
    while core.has_work:
        message = core.step()
        check_core(core)
        for delta in message.deltas:
            started.setdefault(delta.request_id, table.now)
        for failure in message.failed:
            assert (failure.code, "waited too long" in failure.message) == ("UNAVAILABLE", True)
            failed[failure.request_id] = table.now
        table.after(0.5)
    assert list(started) == [0, 1, 2] and max(started.values()) < 50
    assert failed == dict.fromkeys((3, 4, 5), 60.0)


def test_a_request_that_loses_its_promise_again_and_again_waits_a_minute_in_all() -> None:
    """Every 20 s a more urgent one takes the slot for 15 s, before request 0 has the blocks to start."""
    table = Table(limit=9, max_running=1)
    core = make_core(
        Info(num_blocks=24, adapters=table),
        clock=lambda: table.now,
        enable_lora=True,
        block_size=4,
        scheduling_policy="priority",
        enable_prefix_caching=False,
    )
    add(core, 99, [3] * 40, {"priority": -9}, max_tokens=24, ignore_eos=True)
    core.step()
    table.start(A)
    table.finish()
    add(core, 0, [3] * 60, {"attached": Attached(adapter=A), "priority": 9}, max_tokens=2, ignore_eos=True)
    promised: list[bool] = []
    failed: dict[int, float] = {}
    while table.now < 100 and not failed:
        if table.now % 20 == 10:
            number = 1 + int(table.now) // 20
            ref = ref_of(str(number))
            choices = {"attached": Attached(adapter=ref), "priority": -1}
            add(core, number, [3] * 4, choices, max_tokens=3, ignore_eos=True)
            table.finish()
        failed = {failure.request_id: table.now for failure in core.step().failed}
        check_core(core)
        promised.append(A.id in table._promised)
        table.after(5)
    assert promised.count(True) == 6 and failed == {0: 95.0}


def test_a_failure_is_told_and_tried_again_for_a_later_request() -> None:
    table = Table(limit=1)
    table.start(A)
    table.finish("adapter 'a': no")
    assert table.asks(A) == Outcome(False, "adapter 'a': no")
    for _ in range(3):  # many requests with it do not keep the loader busy
        table.after(1).start(A)
        assert table.asks(A) == Outcome(False, "adapter 'a': no") and not table.loading
    table.after(5).start(A)
    table.finish()
    assert table.asks(A) == READY


def test_answers_of_load() -> None:
    table = Table(limit=1)
    first, same = table.load(A), table.load(AdapterRef("other", A.id, A.path, 4))
    assert len(table.loading) == 1 and not first.done()
    table.finish()
    assert (first.result()["name"], same.result()["name"]) == ("a", "other")
    assert table.load(A).done()
    table.hold(A)
    beside = table.load(B)
    table.finish()
    assert beside.result()["name"] == "b" and table.get(B.id) is None, "checked, without room"
    failed: Future[dict[str, Any]] = table.load(C)
    table.finish("adapter 'c': no")
    with pytest.raises(ValueError, match="'c': no"):
        failed.result()


def test_thousands_of_adapters_leave_nothing_behind() -> None:
    """Good and damaged ones, with requests that run, and requests that are aborted while they wait."""
    table = Table(limit=4, max_running=2)
    core = make_core(Info(adapters=table), clock=lambda: table.now, enable_lora=True)
    for number in range(4_000):
        ref = ref_of(str(number))
        add(core, number, [3] * 5, {"attached": Attached(adapter=ref)}, max_tokens=1, ignore_eos=True)
        if number % 100 == 99:  # aborted while it is loaded
            core.abort(number)
        while table.loading:
            table.finish("adapter: damaged" if number % 3 == 0 else "")
        while core.has_work:
            core.step()
        table.after(1)
    assert len(table._entries) <= 4 and not table._waiting and not table._promised
    assert len(table._failures) <= 1024
    (admission,) = (one for one in core.scheduler.listeners if isinstance(one, AdapterAdmission))
    assert not admission._open and not admission._begun and not admission._left


@settings(max_examples=30, deadline=None)
@given(limit=st.integers(1, 3), max_running=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_any_order_of_requests_ends(limit: int, max_running: int, seed: int) -> None:
    """At most `limit` are in memory, none that runs leaves, and every request runs in the end."""
    rng, table = random.Random(seed), Table(limit, max_running)
    refs = [ref_of(str(i)) for i in range(5)]
    waiting = [rng.choice(refs) for _ in range(20)]
    running: list[AdapterRef] = []
    for one in waiting:
        table.start(one)
    for _ in range(2000):
        table.after(0.2)
        if table.loading and rng.random() < 0.7:
            table.finish()
        for one in list(waiting):
            if table.asks(one) == READY and len(running) < 4:
                waiting.remove(one)
                running.append(one)
                table.hold(one)
        assert len(table._entries) <= limit
        assert len({one.id for one in running} | set(table._promised)) <= max_running
        assert all(table.get(one.id) is not None for one in running)
        if running and rng.random() < 0.3:
            table.release(running.pop(0))
        if not waiting and not running:
            return
    raise AssertionError(f"{waiting} never ran")
