"""A traced engine on a clock that ticks at every reading, so that all times in its trace are known."""

from __future__ import annotations

import pytest
from engine_rig import Info, make_core

from inflight.engine.core import EngineCore


class Clock:
    """Replaces the module `time` in the engine core."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic(self) -> int:
        self.now += 1
        return self.now


def traced_core(monkeypatch: pytest.MonkeyPatch, info: Info, **options: int | bool) -> EngineCore:
    monkeypatch.setattr("inflight.engine.core.time", Clock())
    return make_core(info, **{"step_trace": True, "enable_prefix_caching": False, "block_size": 4, **options})
