"""Queue limits count sequences: in the queue, held back, or waiting for a sibling's prompt."""

from __future__ import annotations

from typing import Any

import pytest
from engine_rig import Info, make_core
from virtual_clock import Clocked

from inflight.engine.deltas import RequestFailed
from inflight.engine.integrity import check_core
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams
from inflight.grammars.spec import GrammarSpec

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


def test_so_does_every_sequence_that_waits_for_the_first_ones_prompt(cap: str) -> None:
    rig = Clocked(max_num_seqs=1, max_num_batched_tokens=4, **CAPS[cap])
    rig.add(12, 3, n=5)
    rig.step()
    assert len(rig.scheduler.running) == 1
    assert not rig.waiting, "the others are behind it"
    assert "4 sequences are waiting" in refused(rig, 1).message
    assert rig.core.step().stats.waiting == 4


def test_an_abort_frees_the_places(cap: str) -> None:
    rig = Clocked(max_num_seqs=1, **CAPS[cap])
    rig.add(2, 30)
    rig.step()
    waiting = rig.add(2, 4, n=4)
    refused(rig, 1)
    rig.core.abort(waiting.request_id, 2)  # aborting a child ends no other sequence
    rig.core.abort(waiting.request_id, 2)
    check_core(rig.core)
    rig.core.abort(waiting.request_id)
    rig.core.abort(waiting.request_id)
    check_core(rig.core)
    rig.add(2, 4, n=4)
    rig.run()


def test_a_request_that_never_fits_is_invalid(cap: str) -> None:
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


def test_free_slots_beyond_a_tenants_running_limit_are_no_room_for_it() -> None:
    rig = Clocked(max_num_seqs=8, tenants={"a": {"max_queued": 2, "max_running": 2}})
    rig.add(2, 30, n=4, tenant="a")
    rig.step()
    assert "2 sequences are waiting" in refused(rig, 1, tenant="a").message
    rig.add(2, 4, n=6)  # another tenant can take the slots
    rig.run()


class Compiler:
    """Grammars that only record which compilations begin."""

    def __init__(self) -> None:
        self.started: list[GrammarSpec] = []

    def start(self, spec: GrammarSpec) -> None:
        self.started.append(spec)

    def outcome(self, spec: GrammarSpec) -> str | None:
        return None

    def forget(self, sequence: tuple[int, int]) -> None:
        pass


def test_a_refused_request_compiles_no_grammar() -> None:
    compiler: Any = Compiler()
    core = make_core(Info(grammars=compiler), max_num_seqs=1, max_queue_size=1)
    specs = [GrammarSpec("regex", text) for text in "abcd"]
    failures = [
        core.add_request(AddRequest(number, [1], SamplingParams(grammar=spec, seed=0)))
        for number, spec in enumerate(specs)
    ]
    assert [failure is None for failure in failures] == [True, True, False, False]
    assert compiler.started == specs[:2]
