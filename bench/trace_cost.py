#!/usr/bin/env python3
"""The cost of `step_trace`: the same requests in-process with and without it, in alternating runs.

    python bench/trace_cost.py [--requests 64] [--rounds 5] [--dtype bfloat16] [--output FILE]

Whole runs on a busy machine vary by more than the trace costs.  A second figure therefore times the calls
into the trace themselves, as a share of the run.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import common

SIDES = {"off": False, "on": True}


def run(side: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from inflight import LLM, SamplingParams

    llm = LLM(
        common.checkpoint(arguments["dtype"]),
        dtype=arguments["dtype"],
        max_num_seqs=32,
        cpu_threads=arguments["threads"],
        kv_cache_memory="2GiB",
        enable_prefix_caching=False,
        step_trace=SIDES[side],
    )
    requests = common.workload(arguments["requests"])
    llm.generate([request["prompt"][:16] for request in requests[:8]], SamplingParams(temperature=0.0, max_tokens=4))
    spent = [0.0]
    if llm.trace is not None:
        llm.trace.step_done = timed(llm.trace.step_done, spent)  # type: ignore[method-assign]
    params = [SamplingParams(temperature=0.0, max_tokens=request["out"], ignore_eos=True) for request in requests]
    start = time.perf_counter()
    results = llm.generate([request["prompt"] for request in requests], params)
    seconds = time.perf_counter() - start
    tokens = sum(len(result.outputs[0].token_ids) for result in results)
    return {"tokens_per_second": tokens / seconds, "tokens": tokens, "seconds": seconds, "in_trace": spent[0] / seconds}


def timed(call: Any, spent: list[float]) -> Any:
    def wrapper(*arguments: Any) -> None:
        start = time.perf_counter()
        call(*arguments)
        spent[0] += time.perf_counter() - start

    return wrapper


def main() -> None:
    if "--side" in sys.argv:
        print(json.dumps(run(sys.argv[sys.argv.index("--side") + 1], json.load(sys.stdin))))
        return
    parser = common.parser(__doc__.splitlines()[0])
    parser.set_defaults(rounds=5)
    args = parser.parse_args()
    arguments = {"dtype": args.dtype, "requests": args.requests, "threads": args.threads}
    common.checkpoint(args.dtype)
    common.workload(1)
    runs = common.alternate(__file__, list(SIDES), arguments, args.rounds)
    ratio = common.median_ratio(runs["on"], runs["off"])
    share = statistics.median(one["in_trace"] for one in runs["on"])
    print(f"\n{common.machine()}, {args.dtype}, {args.requests} requests, medians of {args.rounds} alternating runs")
    print(f"  on / off             {ratio:8.4f} of the tokens/s")
    print(f"  in the trace itself  {100 * share:8.4f} % of the run")
    common.record(args.output, runs, arguments, ratio=ratio, in_trace=share)


if __name__ == "__main__":
    main()
