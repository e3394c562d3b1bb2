"""Queue limits count sequences: those in the queue, those held back, those that wait for a sibling's prompt."""

from __future__ import annotations

from typing import Any

import pytest
from virtual_clock import Clocked

from inflight.engine.integrity import check_core
from inflight.engine.messages import RequestFailed

CAPS: dict[str, dict[str, Any]] = {
    "max_queue_size=4": {"max_queue_size": 4},
    "priority_classes: max_queue_size=4": {"priority_classes": {"0": {"max_queue_size": 4}}},
    "tenants: max_queued=4": {"tenants": {"*": {"max_queued": 4}}},
}


@pytest.fixture(params=CAPS)
def cap(request: pytest.FixtureRequest) -> str:
    return request.param


def refused(rig: Clocked, n: int, **fields: Any) -> RequestFailed:
    failure = rig.try_add(2, 4, n=n, **fields)
    assert failure is not None
    return failure


def test_every_sequence_of_a_request_counts(cap: str) -> None:
    rig = Clocked(max_num_seqs=1, **CAPS[cap])
    rig.add(2, 30)
    rig.step()
    rig.add(2, 4, n=3)
    failure = refused(rig, 2)
    assert failure.code == "UNAVAILABLE"
    assert f"3 sequences are waiting, and the 2 of this request do not fit ({cap}); try again later" in failure.message
    rig.add(2, 4)
    assert f"is full: 4 sequences are waiting ({cap})" in refused(rig, 1).message
    rig.run()
    rig.add(2, 4, n=5)  # one may run, and four may wait
    rig.run()


def test_so_do_those_that_wait_for_the_prompt_of_the_first(cap: str) -> None:
    rig = Clocked(max_num_seqs=1, max_num_batched_tokens=4, **CAPS[cap])
    rig.add(12, 3, n=5)
    rig.step()
    assert len(rig.scheduler.running) == 1
    assert not rig.waiting, "the others are behind it"
    assert "4 sequences are waiting" in refused(rig, 1).message
    assert rig.core.step().stats.waiting == 4


def test_an_abort_gives_the_places_back(cap: str) -> None:
    rig = Clocked(max_num_seqs=1, **CAPS[cap])
    rig.add(2, 30)
    rig.step()
    waiting = rig.add(2, 4, n=4)
    refused(rig, 1)
    rig.core.abort(waiting.request_id, 2)  # a child takes nobody along
    rig.core.abort(waiting.request_id, 2)
    check_core(rig.core)
    rig.core.abort(waiting.request_id)
    rig.core.abort(waiting.request_id)
    check_core(rig.core)
    rig.add(2, 4, n=4)
    rig.run()


def test_what_could_never_wait_is_no_matter_of_time(cap: str) -> None:
    rig = Clocked(max_num_seqs=2, **CAPS[cap])
    failure = refused(rig, 7)
    assert failure.code == "INVALID_ARG"
    assert "n=7 sequences never fit the queue" in failure.message
    assert f"({cap}, and 2 may run); lower n" in failure.message
    rig.add(2, 4, n=6)
    rig.run()


def test_other_classes_and_tenants_do_not_count() -> None:
    limits = {"1": {"max_queue_size": 2}}
    tenants = {"a": {"max_queued": 2, "max_running": 1}, "*": {}}
    rig = Clocked(max_num_seqs=2, priority_classes=limits, tenants=tenants)
    for _ in range(2):
        rig.add(2, 30, n=3)
    rig.step()
    rig.add(2, 4, n=2, priority=1)
    assert "priority class 1" in refused(rig, 1, priority=1).message
    rig.add(2, 4, n=2, tenant="a")
    assert "tenant 'a'" in refused(rig, 1, tenant="a").message
    assert "(tenants: max_queued=2, and 1 may run)" in refused(rig, 4, tenant="a").message
    rig.run()
    assert not rig.core.limits.of_tenant, "a tenant without sequences is forgotten"


def test_a_tenants_running_limit_leaves_no_room_for_what_is_beyond_it() -> None:
    rig = Clocked(max_num_seqs=8, tenants={"a": {"max_queued": 2, "max_running": 2}})
    rig.add(2, 30, n=4, tenant="a")
    rig.step()
    assert "2 sequences are waiting" in refused(rig, 1, tenant="a").message
    rig.add(2, 4, n=6)  # another one is free to take the slots
    rig.run()
