"""The engine's state in numbers, on an operator's request.  Pure Python, no torch."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

import msgspec

from inflight.engine.core import EngineCore
from inflight.engine.step import SchedulerOutput

__all__ = ["engine_stats"]

_MAX_TENANTS = 100  # names that clients make up must not make the answer large


def engine_stats(core: EngineCore, since: float) -> dict[str, Any]:
    """The answer to `GetStats`.

    Args:
        core: the engine.
        since: when it was ready, on the monotonic clock.

    Returns:
        pid: of the engine process.
        uptime_seconds: since it was ready; its process may have waited as a spare before.
        async_scheduling, max_num_batched_tokens: what the defaults became on this device.
        load: the present `StepStats` by field; the fields of a step are 0.
        tenants: with fair queueing, `running` and `waiting` sequences by account, the busiest 100; else None.
        num_tenants: accounts with live sequences, None without fair queueing.
    """
    stats = core.stats(SchedulerOutput(), 0.0)
    answer = {
        "pid": os.getpid(),
        "uptime_seconds": time.monotonic() - since,
        "async_scheduling": core.config.launches_ahead,
        "max_num_batched_tokens": core.config.step_tokens,
        "load": msgspec.structs.asdict(stats),
        "tenants": None,
        "num_tenants": None,
    }
    if core.config.tenants:
        live, of = core.limits.of_tenant, core.limits.accounts.of
        running = Counter(of(request.tenant) for request in core.scheduler.running)
        answer["num_tenants"] = len(live)
        answer["tenants"] = {
            name: {"running": running[name], "waiting": count - running[name]}
            for name, count in live.most_common(_MAX_TENANTS)
        }
    return answer
