"""A traced engine on a clock that ticks at each reading: every time in its trace is known."""

from __future__ import annotations

from itertools import count

from engine_rig import Info, make_core

from inflight.engine.core import EngineCore


def traced_core(info: Info, **options: int | bool) -> EngineCore:
    options = {"step_trace": True, "enable_prefix_caching": False, "block_size": 4, **options}
    return make_core(info, clock=count(1).__next__, **options)
