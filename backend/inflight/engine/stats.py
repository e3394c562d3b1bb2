"""The engine's state in numbers: after each step, and on an operator's request.  Pure Python, no torch."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from inflight.engine.messages import StepStats
from inflight.engine.step import SchedulerOutput

if TYPE_CHECKING:
    from inflight.engine.core import EngineCore

__all__ = ["engine_stats", "step_stats"]

_MAX_TENANTS = 100  # names that clients make up must not make the answer large
_STARTED = time.monotonic()


def step_stats(core: EngineCore, out: SchedulerOutput, seconds: float) -> StepStats:
    """The state after the step `out`, which took `seconds`."""
    scheduler, pool, swap = core.scheduler, core.pool, core.scheduler.swap
    return StepStats(
        running=len(scheduler.running),
        waiting=core.limits.num_live - len(scheduler.running),
        preempted_total=scheduler.num_preempted_total,
        blocks_used=pool.num_used,
        blocks_free=pool.num_available,
        prefix_queries_total=pool.num_prefix_queries,
        prefix_hits_total=pool.num_prefix_hits,
        prompt_tokens=out.num_prompt_tokens,
        batch_size=len(out.slots),
        scheduled_tokens=out.num_tokens,
        step_seconds=seconds,
        host_blocks_used=swap.num_used,
        swapped_out_total=swap.num_swapped_out,
        swapped_in_total=swap.num_swapped_in,
        collected_first_total=core.runner.num_collected_first,
        draft_totals=scheduler.policies.draft_counts.totals(),
    )


def engine_stats(core: EngineCore) -> dict[str, Any]:
    """The answer to `GetStats`.

    Returns:
        pid: of the engine process.
        uptime_seconds: since it was started.
        load: the present `StepStats` by field; the fields of a step are 0.
        tenants: with fair queueing, `running` and `waiting` sequences by account, the busiest 100; else None.
        num_tenants: accounts with live sequences, None without fair queueing.
    """
    stats = step_stats(core, SchedulerOutput(), 0.0)
    answer = {
        "pid": os.getpid(),
        "uptime_seconds": time.monotonic() - _STARTED,
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
