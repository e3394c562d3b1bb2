#!/usr/bin/env python3
"""Preemption by recompute, by swap to host memory, and with a host tier: a burst that outgrows the KV pool.

    python bench/preemption.py [--prompt 100] [--requests 32] [--fit 27] [--rounds 3] [--output FILE]

In-process.  Every prompt has so many tokens and every output 150; the pool has room for the prompts of `--fit` requests
and one block more for each.  Admission looks at free blocks only, so that the burst does preempt (the default would
predict it and preempt almost nothing).  The prefix cache is on, as it is by default: a victim's blocks stay in it until
others need them.  Swap is `preemption_mode: "auto"`, which has to find out that swapping is cheaper; it copies the
blocks of a victim as they are, the last one included.  A host tier gets whole extents of a mebibyte, and what is
behind them is computed again.
"""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any

import common

OUTPUT, BLOCK = 150, 16
OPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {},
    "swap": {"swap_space": "2GiB"},
    "tier": {"kv_tiers": [{"type": "host", "size": "2GiB"}]},
}


def run(side: str, arguments: dict[str, Any]) -> common.Run:
    prompt, fit = arguments["prompt"], arguments["fit"]
    blocks = max(fit * (-(-prompt // BLOCK) + 1), -(-(prompt + OUTPUT) // BLOCK) + 2)
    limits = {"max_model_len": prompt + OUTPUT + 1, "num_gpu_blocks_override": blocks, "admission": "free_blocks"}
    usual = {**common.engine_options(arguments), "enable_prefix_caching": True, "block_size": BLOCK}
    core = common.engine({**usual, **limits, **OPTIONS[side]})
    draw = random.Random(1)
    requests = [
        {"id": number, "prompt": [draw.randrange(3, 30_000) for _ in range(prompt)], "out": OUTPUT}
        for number in range(arguments["requests"])
    ]
    warm_up = [{"id": 10**6, "prompt": [5] * prompt, "out": 4}, *common.short(requests)]
    common.generate(core, warm_up)
    cpu, preempted = time.process_time(), core.scheduler.num_preempted_total
    found = common.timed(lambda: common.generate(core, requests))
    totals = core.scheduler.policies.tier_totals()
    return {
        **found,
        "cpu_seconds": time.process_time() - cpu,
        "preemptions": core.scheduler.num_preempted_total - preempted,
        "blocks_swapped_out": core.scheduler.swap.num_swapped_out,
        "seconds_per_swapped_block": core.info.swap_seconds_per_block,
        "tier_hits": 0 if totals is None else totals.hits_total,
    }


def summary(runs: dict[str, list[common.Run]]) -> dict[str, Any]:
    baseline = runs["recompute"]
    return {
        "cpu_seconds": {side: common.median_ratio(runs[side], baseline, "cpu_seconds") for side in runs},
        "preemptions": {side: common.median(runs[side], "preemptions") for side in runs},
        "tier_hits": common.median(runs["tier"], "tier_hits"),
    }


SIDES = {side: partial(run, side) for side in OPTIONS}


if __name__ == "__main__":
    common.compare(__file__, __doc__, SIDES, summary, requests=32, prompt=100, fit=27)
