#!/usr/bin/env python3
"""Preemption by swap to host memory and by recompute: tokens/s of a burst that outgrows the KV pool.

    python bench/preemption.py [--requests 32] [--rounds 3] [--output FILE]

In-process.  Every prompt has 100 tokens and every output 150; the pool has 192 blocks of 16 tokens, enough for
the prompts of 27 requests or for 12 complete ones.  Admission looks at free blocks only, so that the burst does
preempt (the default would predict it and preempt almost nobody), and prefix caching is off, so that recompute
starts from nothing.  Swap is `preemption_mode: "auto"`, which has to find out that swapping is cheaper.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import common

_PROMPT, _OUTPUT, _BLOCKS = 100, 150, 192


def run(swap_space: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from inflight.config import EngineConfig
    from inflight.engine.assembly import make_core
    from inflight.engine.messages import AddRequest
    from inflight.engine.sampling_params import SamplingParams
    from inflight.runner.pipeline import make_runner

    config = EngineConfig.from_dict(
        {
            "model": common.checkpoint(arguments["dtype"]),
            "dtype": arguments["dtype"],
            "cpu_threads": arguments["threads"],
            "max_num_seqs": 32,
            "max_model_len": 16 * _BLOCKS,
            "num_gpu_blocks_override": _BLOCKS,
            "admission": "free_blocks",
            "enable_prefix_caching": False,
            "swap_space": swap_space,
        }
    )
    core = make_core(config, make_runner(config))

    def generate(requests: list[dict[str, Any]], output: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        for request in requests:
            prompt = (request["prompt"] * _PROMPT)[:_PROMPT]
            assert core.add_request(AddRequest(request["id"], prompt, params)) is None
        count = 0
        while core.has_work:
            count += sum(len(delta.token_ids) for delta in core.step().deltas)
        return count

    requests = common.workload(arguments["requests"])
    generate(requests[:8], 4)
    start = time.perf_counter()
    tokens = generate(requests, _OUTPUT)
    seconds = time.perf_counter() - start
    return {
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
        "preemptions": core.scheduler.num_preempted_total,
        "blocks_swapped_out": core.scheduler.swap.num_swapped_out,
        "seconds_per_swapped_block": core.info.swap_seconds_per_block,
    }


SIDES = {"recompute": partial(run, "0"), "swap": partial(run, "1GiB")}


if __name__ == "__main__":
    common.compare(__file__, __doc__.splitlines()[0], SIDES)
