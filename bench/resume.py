#!/usr/bin/env python3
"""A preempted request resumes beside others: computed again, swapped to host memory and back, or from a host tier.

    python bench/resume.py [--contexts 250 1000 4000] [--beside 4] [--repeats 5] [--rounds 3] [--output FILE]

In-process.  A request with so many tokens and `--beside` short ones decode; then it is preempted, and the prefix cache
forgets its blocks, as it does where others need them.  From there until its next token: seconds, CPU seconds, and the
longest gap of the others.  Swap is `preemption_mode: "swap"`.  CPU seconds include the steps of the others meanwhile.
There must be others: loads begin once a step has been made after a preemption.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from typing import Any

import common

OPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {},
    "swap": {"swap_space": "2GiB", "preemption_mode": "swap"},
    "tier": {"kv_tiers": [{"type": "host", "size": "2GiB"}]},
}
FIGURES = "seconds", "cpu_seconds", "gap"


def run(side: str, arguments: dict[str, Any]) -> common.Run:
    core = common.engine({**common.engine_options(arguments), "enable_prefix_caching": True, **OPTIONS[side]})
    found: common.Run = {}
    for context in arguments["contexts"]:
        draw, beside = random.Random(context), arguments["beside"]
        for other in range(1, 1 + beside):
            common.add(core, other, [draw.randrange(3, 30_000) for _ in range(20)], max_tokens=4000)
        common.add(core, 0, [draw.randrange(3, 30_000) for _ in range(context)], max_tokens=150)
        repeats = [once(core) for _ in range(arguments["repeats"] + 1)]
        for request_id in range(1 + beside):
            core.abort(request_id)
        common.drain(core)
        found[f"{context} tokens"] = [token for one in repeats for token in one["tokens"]]
        hits = statistics.median(one["hits"] for one in repeats[1:])
        assert (hits > 0) == (side == "tier"), f"{side}, {context} tokens: {hits} of them came from a tier"
        for name in FIGURES:  # in the first one the engine learns what it costs
            found[f"{context} {name}"] = statistics.median(one[name] for one in repeats[1:])
    return found


def once(core: Any) -> common.Run:
    """Preempt request 0 when it has 24 tokens more, and step until it has the next one."""
    tokens: list[int] = []
    while len(tokens) < 24:
        tokens += step(core).get(0, [])
    hits = num_hits(core)
    preempt(core, next(one for one in core.scheduler.running if one.request_id == 0))
    start, cpu = time.perf_counter(), time.process_time()
    last, gap = start, 0.0
    while True:
        here = step(core)
        now = time.perf_counter()
        if here.keys() - {0}:  # the others get theirs together
            gap, last = max(gap, now - last), now
        if 0 in here:
            figures = {"seconds": now - start, "cpu_seconds": time.process_time() - cpu, "gap": gap}
            return {**figures, "tokens": tokens + here[0], "hits": num_hits(core) - hits}


def num_hits(core: Any) -> int:
    """Tokens that came from a tier, ever."""
    return 0 if core.info.tiers is None else core.info.tiers.num_hits


def preempt(core: Any, request: Any) -> None:
    """As the scheduler does in need of blocks, which others then take."""
    from inflight.engine.step import SchedulerOutput

    core.scheduler._preempt(request, SchedulerOutput())
    pool = core.pool
    while pool._cached:
        pool._evict()
    time.sleep(0.05)  # the tier's writer is through


def step(core: Any) -> dict[int, list[int]]:
    """The tokens of the requests that got some."""
    from inflight.engine.held_requests import HELD_POLL_SECONDS

    message = core.step()
    assert not message.failed, message.failed
    if not message.stats.batch_size:
        time.sleep(HELD_POLL_SECONDS)
    found = {number: [token] for number, token in zip(message.tokens.request_ids, message.tokens.token_ids)}
    return found | {delta.request_id: list(delta.token_ids) for delta in message.deltas}


def main() -> None:
    if common.ran_side(run):
        return
    args = common.options(
        __doc__, dtype=common.choice(["bfloat16", "float32"], "bfloat16"), contexts=[250, 1000, 4000], beside=4,
        repeats=5, rounds=3, threads=os.cpu_count(),
    )  # fmt: skip
    common.checkpoint(dtype=args.dtype)
    arguments = {name: value for name, value in vars(args).items() if name != "output"}

    def line(found: common.Run) -> str:
        return "  ".join(f"{name} {1000 * value:.1f} ms" for name, value in found.items() if "seconds" in name)

    runs = common.alternate(
        OPTIONS, args.rounds, lambda side, _: common.in_fresh_process(__file__, side, arguments), line
    )
    for context in args.contexts:
        sides = {side: [run[f"{context} tokens"] for run in found] for side, found in runs.items()}
        assert all(tokens == sides["swap"] for tokens in sides.values()), f"{context}: the tokens differ"
    names = [f"{context} {name}" for context in args.contexts for name in FIGURES]
    ratios = {
        side: {name: common.median_ratio(runs[side], runs["swap"], name) for name in names}
        for side in ("recompute", "tier")
    }
    medians = common.medians(runs, *names)
    print(f"medians: {medians}\nto swap: {ratios}")
    common.record(args, runs, medians=medians, to_swap=ratios)


if __name__ == "__main__":
    main()
