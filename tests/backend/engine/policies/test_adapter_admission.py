"""Requests with adapters: which events reach the table of adapters."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from engine_rig import Info, make_core

from inflight.engine.adapter import AdapterRef, Leaving, Outcome
from inflight.engine.attached import Attached
from inflight.engine.core import EngineCore
from inflight.engine.messages import AddRequest
from inflight.engine.policies.adapter_admission import AdapterAdmission
from inflight.engine.policies.base import NotYet
from inflight.engine.policies.defaults import FcfsOrder
from inflight.engine.request import Request
from inflight.engine.sampling_params import SamplingParams


class Table:
    """Implements `Adapters`."""

    def __init__(self) -> None:
        self.waiting = ""  # names
        self.held: list[str] = []
        self.forgotten: list[str] = []

    def reset(self, goes_before: Callable[[Any, Any], bool], leaving: Leaving) -> None: ...

    def load_of(self, ref: AdapterRef) -> Future[dict[str, Any]]:
        return Future()

    def step_done(self, seconds: float, num_running: int) -> None: ...

    def start(self, ref: AdapterRef, request: Any) -> None: ...

    def outcome(self, ref: AdapterRef, request: Any, begun: bool) -> Outcome:
        return Outcome(begun or ref.name not in self.waiting)

    def hold(self, ref: AdapterRef) -> None:
        self.held.append(ref.name)

    def release(self, ref: AdapterRef) -> None:
        self.held.remove(ref.name)

    def forget(self, ref: AdapterRef) -> None:
        self.forgotten.append(ref.name)

    def load(self, ref: AdapterRef) -> Future[dict[str, Any]]:
        return Future()


@pytest.fixture
def table() -> Table:
    return Table()


def core_of(table: Table, num_blocks: int = 64, **config: Any) -> EngineCore:
    return make_core(Info(num_blocks=num_blocks, adapters=table), enable_lora=True, **config)


def add(core: EngineCore, request_id: int, name: str, length: int = 5, **params: Any) -> None:
    attached = Attached(adapter=AdapterRef(name, f"id of {name}", "/nowhere", 4))
    message = AddRequest(request_id, [3] * length, SamplingParams(ignore_eos=True, **params), attached=attached)
    assert core.add_request(message) is None


def test_the_last_request_to_end_is_told(table: Table) -> None:
    core = core_of(table)
    table.waiting = "a"
    add(core, 1, "a", n=2)
    add(core, 2, "a")
    core.step()
    core.abort(1)
    assert table.forgotten == []
    core.abort(2)
    assert table.forgotten == ["a"]


def test_a_request_that_has_begun_holds_its_adapter_once_until_it_ends(table: Table) -> None:
    """Its second sequence starts after the first one's prompt, while the adapter starts no more requests."""
    core = core_of(table, max_num_batched_tokens=8)
    add(core, 1, "a", length=12, n=2, max_tokens=3)
    core.step()
    assert table.held == ["a"]
    table.waiting = "a"
    add(core, 2, "a", max_tokens=3)
    ended = set()
    for _ in range(20):
        ended |= {(delta.request_id, delta.index) for delta in core.step().deltas if delta.finish_reason is not None}
        assert table.held == ([] if len(ended) == 2 else ["a"])
    assert ended == {(1, 0), (1, 1)} and table.forgotten == []
    core.abort(2)
    assert table.forgotten == ["a"]


@pytest.mark.parametrize("answer", [True, False, NotYet("its grammar", 20.0)])
def test_who_waits_for_something_else_waits_for_no_adapter(table: Table, answer: bool | NotYet) -> None:
    inner = SimpleNamespace(admits=lambda *args: answer)
    attached = Attached(adapter=AdapterRef("a", "id of a", "/nowhere", 4))
    request = Request(1, [3], SamplingParams(), attached=attached)
    admission = AdapterAdmission(inner, table, FcfsOrder(), None, lambda: 0.0)  # type: ignore[arg-type]
    assert admission.admits(request, [], [], None) is answer  # type: ignore[arg-type]
    assert table.forgotten == ([] if isinstance(answer, bool) else ["a"])


def test_a_preempted_request_keeps_its_adapter(table: Table) -> None:
    core = core_of(table, num_blocks=16, block_size=4, enable_prefix_caching=False)
    for request_id, name in enumerate("ab"):
        add(core, request_id, name, length=20, max_tokens=40)
    while not core.scheduler.num_preempted_total:
        core.step()
    assert len(core.scheduler.running) == 1 and sorted(table.held) == ["a", "b"]
    table.waiting = "ab"
    while core.has_work:
        assert not core.step().failed
        assert not core.scheduler.held
    assert table.held == []
