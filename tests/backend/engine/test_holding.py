"""Admission's third answer, "not yet": others pass the request, which is judged again until its deadline."""

from __future__ import annotations

import pytest
from drafters import add_gate
from engine_rig import Info, add, collect, expected_output, make_core, run_until_idle

from inflight.engine.integrity import check_core, check_scheduler
from inflight.engine.messages import decode_to_frontend, encode


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_others_pass_a_request_that_is_not_ready():
    core = make_core(Info(), max_num_seqs=1)
    gate = add_gate(core, {1: None})
    params = {i: add(core, i, [i, 2], max_tokens=3, ignore_eos=True) for i in (1, 2, 3)}
    outputs, reasons = {}, {}
    for _ in range(6):
        collect(core, outputs, reasons)
    assert set(reasons) == {(2, 0), (3, 0)}
    assert core.has_work and core.only_holds
    assert core.step().stats.waiting == 1
    gate.waits[1] = 0
    run_until_idle(core, outputs, reasons)
    assert outputs[1, 0] == expected_output([1, 2], params[1], core.info)[0]


def test_a_request_that_is_ready_returns_to_the_front_of_the_queue():
    core = make_core(Info(), max_num_seqs=1)
    gate = add_gate(core, {1: None, 2: None})
    for request_id in (1, 2, 3, 4):
        add(core, request_id, [request_id], max_tokens=2, ignore_eos=True)
    core.step()
    assert [request.request_id for request in core.scheduler.held] == [1, 2]
    gate.waits.clear()
    outputs, reasons = {}, {}
    run_until_idle(core, outputs, reasons)
    assert list(reasons) == [(3, 0), (1, 0), (2, 0), (4, 0)]


def test_a_request_held_too_long_fails_with_the_reason():
    clock = Clock()
    core = make_core(Info(), clock=clock)
    add_gate(core, {1: None}, seconds=5)
    add(core, 1, [1], n=2)
    add(core, 2, [2], max_tokens=2, ignore_eos=True)
    assert core.step().failed == []
    clock.now = 4.9
    assert core.step().failed == []
    clock.now = 5.0
    message = decode_to_frontend(encode(core.step()))
    (failure,) = message.failed
    assert (failure.request_id, failure.code) == (1, "UNAVAILABLE")
    assert "waited too long for its grammar to compile" in failure.message
    check_core(core)
    assert not core.has_work, "all of its sequences ended"


def test_a_sequence_held_too_long_fails_its_whole_request():
    clock = Clock()
    core = make_core(Info(), clock=clock)
    gate = add_gate(core, {}, seconds=5)
    add(core, 1, [1, 2], n=3, max_tokens=30, ignore_eos=True)
    core.step()
    gate.waits[1] = None
    core.step()
    assert len(core.scheduler.held) == 2
    clock.now = 6.0
    (failure,) = core.step().failed
    assert failure.request_id == 1
    assert not core.has_work
    check_core(core)


def test_a_held_request_can_be_aborted():
    core = make_core(Info())
    add_gate(core, {1: None})
    add(core, 1, [1], max_tokens=2)
    core.step()
    core.abort(1)
    check_core(core)
    assert not core.has_work


def test_no_request_is_preempted_for_one_that_is_not_ready():
    core = make_core(Info(num_blocks=16), block_size=4, scheduling_policy="priority", enable_prefix_caching=False)
    add_gate(core, {2: None})
    add(core, 1, [1] * 30, {"priority": 9}, max_tokens=30, ignore_eos=True)
    core.step()
    add(core, 2, [2] * 40, {"priority": 0}, max_tokens=20, ignore_eos=True)
    core.step()
    assert core.scheduler.num_preempted_total == 0
    assert [request.request_id for request in core.scheduler.held] == [2]


def test_a_preempted_request_may_be_held_again():
    info = Info(num_blocks=16, num_host_blocks=50)
    core = make_core(info, block_size=4, enable_prefix_caching=False, preemption_mode="swap", swap_space="1MiB")
    gate = add_gate(core, {})
    params = {i: add(core, i, [i] * 20, max_tokens=40, ignore_eos=True) for i in (1, 2)}
    outputs, reasons = {}, {}
    while not core.scheduler.num_preempted_total:
        collect(core, outputs, reasons)
    gate.waits[2] = 5
    run_until_idle(core, outputs, reasons)
    for i in (1, 2):
        assert outputs[i, 0] == expected_output([i] * 20, params[i], info)[0]


def test_the_deadline_starts_anew_once_a_request_has_run():
    clock = Clock()
    core = make_core(Info(num_blocks=16), clock=clock, block_size=4, enable_prefix_caching=False)
    gate = add_gate(core, {2: 1}, seconds=5)
    for i in (1, 2):
        add(core, i, [i] * 20, max_tokens=40, ignore_eos=True)
    while not core.scheduler.num_preempted_total:
        core.step()
    gate.waits[2], clock.now = None, 100.0
    core.step()
    assert not core.step().failed
    clock.now = 105.0
    assert [failure.request_id for failure in core.step().failed] == [2]


def test_the_deadline_counts_anew_after_a_request_was_ready():
    """It was ready, found no slot, and by the time that it is next it is not ready again."""
    clock = Clock()
    core = make_core(Info(), max_num_seqs=1, clock=clock)
    gate = add_gate(core, {1: None}, seconds=5)
    add(core, 1, [1], max_tokens=2, ignore_eos=True)
    add(core, 2, [2], max_tokens=9, ignore_eos=True)
    core.step()
    gate.waits[1] = 0
    core.step()
    assert [len(core.scheduler.held), len(core.scheduler.waiting)] == [0, 1]
    gate.waits[1], clock.now = None, 9.0
    while not core.scheduler.held:
        core.step()
    clock.now = 13.9
    assert not core.step().failed and core.scheduler.held
    clock.now = 14.0
    assert [failure.request_id for failure in core.step().failed] == [1]


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_at_the_limit_of_held_requests_none_overtakes(limit):
    core = make_core(Info(), max_num_seqs=8)
    core.scheduler.held.limit = limit
    add_gate(core, dict.fromkeys(range(5)))
    for request_id in range(6):
        add(core, request_id, [1], max_tokens=2)
    out = core.scheduler.schedule()
    check_scheduler(core.scheduler)
    assert len(core.scheduler.held) == limit
    assert not out.slots, "the first request that cannot be held keeps its place"


@pytest.mark.parametrize("limit", [0, 2])
def test_an_urgent_request_that_cannot_be_held_preempts_no_other(limit):
    core = make_core(Info(), max_num_seqs=3, scheduling_policy="priority")
    core.scheduler.held.limit = limit
    add_gate(core, dict.fromkeys(range(10, 13)))
    for request_id in range(3):
        add(core, request_id, [1, 2], {"priority": 9}, max_tokens=20, ignore_eos=True)
    core.step()
    for request_id in range(10, 13):
        add(core, request_id, [3], {"priority": 0}, max_tokens=2)
    core.step()
    check_core(core)
    assert (len(core.scheduler.running), core.scheduler.num_preempted_total) == (3, 0)
    assert len(core.scheduler.held) == limit
