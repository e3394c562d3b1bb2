"""The engine's state in numbers, after each step.  Pure Python, no torch."""

from __future__ import annotations

from inflight.engine.deltas import StepStats
from inflight.engine.queue_limits import QueueLimits
from inflight.engine.scheduler import Scheduler
from inflight.engine.step import SchedulerOutput

__all__ = ["step_stats"]


def step_stats(
    scheduler: Scheduler, limits: QueueLimits, num_collected_first: int, out: SchedulerOutput, seconds: float
) -> StepStats:
    """The state after the step `out`, which took `seconds`; `num_collected_first` is the runner's."""
    pool, swap = scheduler.pool, scheduler.swap
    num_batches, num_dropped = scheduler.policies.kv_event_totals()
    return StepStats(
        running=len(scheduler.running),
        waiting=limits.num_live - len(scheduler.running),
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
        collected_first_total=num_collected_first,
        draft_totals=scheduler.policies.draft_counts.totals(),
        kv_tiers=scheduler.policies.tier_totals(),
        kv_event_batches_total=num_batches,
        kv_event_batches_dropped_total=num_dropped,
    )
