#!/usr/bin/env python3
"""The cost of a step outside the device: `schedule()` and `update()` with many requests running.

    python bench/scheduler.py [--running 256 1024] [--waiting 1000] [--steps 400] [--pool 1.0 0.25]
                              [--order fcfs priority sjf edf tenants] [--output FILE]

The real scheduler, pool and policies, with the defaults of `model.json` or `--admission free_blocks`.  Every
running request decodes one token a step; a waiting one replaces each that ends; blocks are allocated, filled
and published as in the engine.

--order    policies to measure, in alternating runs; requests are of three classes and twenty tenants
--pool     size of the pool in 512-token requests, as a share of the slots: at 1 slots are scarce; at 0.25
           blocks are, fewer requests run than there are slots, and every step asks whether one more fits

Nothing else runs in the process; the garbage collector is set as in the engine process.  Targets: 300
microseconds with 256 running requests, 1.2 ms with 1,024.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from typing import Any

import common

from inflight.config import EngineConfig
from inflight.engine.kv_pool import KVPool
from inflight.engine.policies.selection import make_policies
from inflight.engine.request import Request
from inflight.engine.sampling_params import SamplingParams
from inflight.engine.scheduler import Scheduler, SchedulerLimits
from inflight.engine.step import StepOutput
from inflight.worker import settle_garbage_collector

TARGET = {256: 300.0, 1024: 1200.0}  # microseconds
BLOCK_SIZE = 16
ORDERS: dict[str, dict[str, Any]] = {
    **{policy: {"scheduling_policy": policy} for policy in ("fcfs", "priority", "sjf", "edf")},
    "tenants": {"tenants": {"*": {"per_name": True}}},
}


def fill(scheduler: Scheduler, count: int, rng: random.Random, first_id: int) -> None:
    """Queue `count` requests: prompts of 16 to 128 tokens, outputs lognormal(4.0, 0.8) in 10..370."""
    for request_id in range(first_id, first_id + count):
        prompt = [rng.randrange(32_000) for _ in range(rng.randrange(16, 129))]
        max_tokens = int(min(max(rng.lognormvariate(4.0, 0.8), 10), 370))
        params = SamplingParams(max_tokens=max_tokens)
        scheduler.add(Request(request_id, prompt, params, priority=request_id % 3, tenant=str(request_id % 20)))


def measure(
    running: int, waiting: int, steps: int, seed: int, order: str, admission: str, pool: float
) -> dict[str, Any]:
    """Medians over `steps` steps, in microseconds; each has `running` requests if the pool holds as many."""
    rng = random.Random(seed)
    blocks = int(pool * (running + 1) * (512 // BLOCK_SIZE))
    policies = make_policies(EngineConfig(model="none", admission=admission, **ORDERS[order]))
    scheduler = Scheduler(SchedulerLimits(running, max(2048, 2 * running)), KVPool(blocks, BLOCK_SIZE), policies)
    fill(scheduler, running + waiting, rng, 0)
    num_requests = running + waiting
    settle_garbage_collector()
    schedule, update, rows = [], [], []
    steps_to_fill = 0 if pool >= 1 else 400
    while len(schedule) < steps:
        start = time.perf_counter()
        out = scheduler.schedule()
        scheduled = time.perf_counter()
        tokens = [rng.randrange(1, 32_000) if samples else -1 for samples in out.samples]
        result = StepOutput(tokens)
        executed = time.perf_counter()
        scheduler.update(out, result)
        end = time.perf_counter()
        steps_to_fill -= 1
        full = len(out.slots) == running if pool >= 1 else steps_to_fill < 0
        if full and out.num_tokens <= 2 * running:  # mostly decodes
            rows.append(len(out.slots))
            schedule.append(scheduled - start)
            update.append(end - executed)
        missing = running + waiting - len(scheduler.running) - len(scheduler.waiting)
        fill(scheduler, missing, rng, num_requests)
        num_requests += missing
    gc.unfreeze()
    both = sorted(1e6 * (a + b) for a, b in zip(schedule, update))
    return {
        "order": order,
        "running": running,
        "pool": pool,
        "in_a_step": statistics.median(rows),
        "preemptions": scheduler.num_preempted_total,
        "waiting": waiting,
        "steps": steps,
        "schedule_us": 1e6 * statistics.median(schedule),
        "update_us": 1e6 * statistics.median(update),
        "both_us": statistics.median(both),
        "both_p99_us": both[int(0.99 * len(both))],
        "target_us": TARGET.get(running) if pool >= 1 else None,
    }


def main() -> None:
    args = common.options(
        __doc__,
        running=list(TARGET),
        waiting=1000,
        steps=400,
        order=dict(nargs="+", choices=list(ORDERS), default=["fcfs"]),
        admission=common.choice(["predicted_peak", "free_blocks"], "predicted_peak"),
        pool=dict(type=float, nargs="+", default=[1.0], help="1: slots are scarce; 0.25: blocks"),
        rounds=3,
    )
    cases = [(number, order, pool) for pool in args.pool for number in args.running for order in args.order]
    runs = [
        [measure(n, args.waiting, args.steps, seed, order, args.admission, pool) for n, order, pool in cases]
        for seed in range(args.rounds)
    ]
    print(f"{common.machine()}, medians of {args.rounds} x {args.steps} steps, {args.waiting} requests waiting")
    summary = []
    for (_, order, _), at in zip(cases, zip(*runs)):
        measured = [key for key, value in at[0].items() if isinstance(value, (int, float))]
        row = {"order": order, **{key: statistics.median(run[key] for run in at) for key in measured}}
        summary.append(row)
        target = f"   target {row['target_us']:.0f}" if "target_us" in row else ""
        print(
            f"  {row['in_a_step']:5.0f} running, pool {row['pool']:4}, {order:8}: schedule {row['schedule_us']:6.0f} us"
            f" + update {row['update_us']:6.0f} us = {row['both_us']:6.0f} us (p99 {row['both_p99_us']:6.0f}){target}"
        )
    common.record(args, {"scheduler": [row for run in runs for row in run]}, summary=summary)


if __name__ == "__main__":
    main()
