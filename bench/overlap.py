#!/usr/bin/env python3
"""The engine with and without `async_scheduling`: same checkpoint, work and threads.

    python bench/overlap.py [--threads 1] [--requests 64] [--rounds 3] [--dtype bfloat16] [--output FILE]

With it step n + 1 is scheduled while a second thread runs step n.  If the device is the CPU, that needs a core
that the kernels leave free: on two cores `--threads 1` leaves one, `--threads 2` none.
"""

from __future__ import annotations

import common
from static import run_inflight

SIDES = {
    "one after the other": run_inflight,
    "async_scheduling": lambda arguments: run_inflight(arguments, async_scheduling=True),
}


if __name__ == "__main__":
    common.compare(__file__, __doc__, SIDES)
