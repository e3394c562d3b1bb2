"""Requests with adapters: which events reach the table of adapters."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from engine_rig import Info, make_core

from inflight.engine.adapter import AdapterRef
from inflight.engine.attached import Attached
from inflight.engine.core import EngineCore
from inflight.engine.messages import AddRequest
from inflight.engine.sampling_params import SamplingParams


class Table:
    """Implements `Adapters`; `answers` by name."""

    def __init__(self) -> None:
        self.answers: dict[str, str | None] = {}
        self.held: list[str] = []
        self.forgotten: list[str] = []

    def reset(self) -> None: ...

    def start(self, ref: AdapterRef) -> None: ...

    def outcome(self, ref: AdapterRef) -> str | None:
        return self.answers.get(ref.name, "")

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


def core_of(table: Table, **config: Any) -> EngineCore:
    info = Info()
    info.adapters = table
    return make_core(info, enable_lora=True, **config)


def add(core: EngineCore, request_id: int, name: str, length: int = 5, **params: Any) -> None:
    attached = Attached(adapter=AdapterRef(name, f"id of {name}", "/nowhere", 4))
    message = AddRequest(request_id, [3] * length, SamplingParams(ignore_eos=True, **params), attached=attached)
    assert core.add_request(message) is None


def test_the_last_request_to_end_is_told(table: Table) -> None:
    core = core_of(table)
    table.answers["a"] = None
    add(core, 1, "a", n=2)
    add(core, 2, "a")
    core.step()
    core.abort(1)
    assert table.forgotten == []
    core.abort(2)
    assert table.forgotten == ["a"]
