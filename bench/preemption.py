#!/usr/bin/env python3
"""Preemption by swap to host memory and by recompute: tokens/s of a burst that outgrows the KV pool.

    python bench/preemption.py [--requests 32] [--rounds 3] [--output FILE]

In-process.  Every prompt has 100 tokens and every output 150; the pool has 192 blocks of 16 tokens, enough for
the prompts of 27 requests or for 12 complete ones.  Admission looks at free blocks only, so that the burst does
preempt (the default would predict it and preempt almost nothing), and prefix caching is off, so that recompute
starts from nothing.  Swap is `preemption_mode: "auto"`, which has to find out that swapping is cheaper.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import common

PROMPT, OUTPUT, BLOCKS = 100, 150, 192


def run(swap_space: str, arguments: dict[str, Any]) -> common.Run:
    limits = {"max_model_len": 16 * BLOCKS, "num_gpu_blocks_override": BLOCKS, "admission": "free_blocks"}
    core = common.engine({**common.engine_options(arguments), **limits, "swap_space": swap_space})
    requests = [
        {**request, "prompt": (request["prompt"] * PROMPT)[:PROMPT], "out": OUTPUT}
        for request in common.workload(arguments["requests"])
    ]
    common.generate(core, common.short(requests))
    return {
        **common.timed(lambda: common.generate(core, requests)),
        "preemptions": core.scheduler.num_preempted_total,
        "blocks_swapped_out": core.swap.num_swapped_out,
        "seconds_per_swapped_block": core.info.swap_seconds_per_block,
    }


SIDES = {"recompute": partial(run, "0"), "swap": partial(run, "1GiB")}


if __name__ == "__main__":
    common.compare(__file__, __doc__, SIDES)
