#!/usr/bin/env python3
"""The engine with `async_scheduling` against the engine without: same checkpoint, work, threads.

    python bench/overlap.py [--threads 1] [--requests 64] [--rounds 3] [--dtype bfloat16] [--output FILE]

With it step n + 1 is made while step n runs in a thread of its own.  Where the device is the CPU, that
needs a core that the kernels leave free: `--threads 1` of two cores has one, `--threads 2` has none.
"""

from __future__ import annotations

import common
from static import run_inflight

SIDES = {
    "one after the other": run_inflight,
    "async_scheduling": lambda arguments: run_inflight(arguments, async_scheduling=True),
}


if __name__ == "__main__":
    common.compare(__file__, __doc__.splitlines()[0], SIDES)
