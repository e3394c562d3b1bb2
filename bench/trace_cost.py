#!/usr/bin/env python3
"""The cost of `step_trace`: the same requests in-process with and without it, in alternating runs.

    python bench/trace_cost.py [--requests 64] [--rounds 5] [--dtype bfloat16] [--output FILE]

Whole runs on a busy machine vary by more than the trace costs.  A second figure therefore times the calls
into the trace themselves, as a share of the run.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import common
from static import run_inflight


def run_traced(arguments: dict[str, Any]) -> common.Run:
    spent = 0.0

    def prepare(llm: Any) -> None:
        add = llm.core.trace.add

        def timed(*given: Any) -> None:
            nonlocal spent
            start = time.perf_counter()
            add(*given)
            spent += time.perf_counter() - start

        llm.core.trace.add = timed

    run = run_inflight(arguments, prepare, step_trace=True)
    return {**run, "in_trace": spent / run["seconds"]}


def share(runs: dict[str, list[common.Run]]) -> dict[str, Any]:
    """The share of the run within the trace itself."""
    return {"in_trace": statistics.median(one["in_trace"] for one in runs["on"])}


SIDES = {"off": run_inflight, "on": run_traced}


if __name__ == "__main__":
    common.compare(__file__, __doc__, SIDES, share, rounds=5)
