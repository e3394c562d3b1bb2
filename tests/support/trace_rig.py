"""A traced engine on a clock that ticks once a look: every time in its trace is known."""

from __future__ import annotations

import pytest
from engine_rig import Info, make_core

from inflight.engine.core import EngineCore


class Clock:
    """Stands in for the module `time` where the engine core looks."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic(self) -> int:
        self.now += 1
        return self.now


def traced_core(monkeypatch: pytest.MonkeyPatch, info: Info, **options: int | bool) -> EngineCore:
    monkeypatch.setattr("inflight.engine.core.time", Clock())
    return make_core(info, **{"step_trace": True, "enable_prefix_caching": False, "block_size": 4, **options})
