"""The job of one run, for the scripts beside this file, which `bench/cpu.py` starts with each engine's interpreter.

    python run_NAME.py JOB.json

The job says: `checkpoint` (a directory), `requests` ({id, prompt, out}), `warm_up` (the same), `weights` ("bf16" or
"fp32"), `kv` ("bf16", "fp32" or "u8"), `threads`, `max_num_seqs`, `kv_gib`, `started` (seconds since the epoch when
the process was spawned), `result` (the file to write), `options` (for this engine alone).

Standard library only: no environment of a peer needs anything of ours.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

TORCH_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def read() -> dict[str, Any]:
    return json.loads(Path(sys.argv[1]).read_text())


def write(result: dict[str, Any]) -> None:
    Path(read()["result"]).write_text(json.dumps(result))


def cpu_seconds() -> float:
    """CPU time so far of this process and the processes below it that live."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # the name before it may hold blanks
        except OSError:
            continue  # it has ended
        pid = int(stat.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    found = {os.getpid()}
    while below := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= below
    return sum(ticks[pid] for pid in found) / os.sysconf("SC_CLK_TCK")


def peak_rss() -> int:
    """Bytes: high-water mark of this process's resident memory (`ru_maxrss` would begin at that of its parent)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def run(
    packages: list[str],
    load: Callable[[dict[str, Any]], Any],
    generate: Callable[[Any, list[dict[str, Any]]], list[list[int]] | int],
    more: Callable[[Any], dict[str, Any]] | None = None,
) -> None:
    """Load, warm up, time one `generate` over all requests, and write the result.

    Args:
        packages: distributions whose versions belong to the record.
        load: job -> engine, ready for requests.
        generate: engine, requests -> output token ids of each in the order of the requests, or their total where it
            has compared that itself; greedy, end of sequence ignored, everything offered at once.
        more: engine -> what else belongs to the result; called last.

    Raises:
        AssertionError: a request did not get exactly the tokens that it asked for.
    """
    task = read()
    engine = load(task)
    ready_seconds = time.time() - task["started"]
    generate(engine, task["warm_up"])
    start, busy = time.perf_counter(), cpu_seconds()
    outputs = generate(engine, task["requests"])
    seconds, busy = time.perf_counter() - start, cpu_seconds() - busy
    peak = peak_rss()
    asked = [request["out"] for request in task["requests"]]
    came = sum(asked) if outputs == sum(asked) else [len(output) for output in outputs]  # type: ignore[union-attr]
    assert came in (asked, sum(asked)), f"asked for {asked} tokens, got {came}"
    result = {
        "seconds": seconds,
        "cpu_seconds": busy,
        "tokens": sum(asked),
        "tokens_per_second": sum(asked) / seconds,
        "ready_seconds": ready_seconds,
        "peak_rss": peak,
        "versions": {name: version(name) for name in packages},
        "outputs": outputs if isinstance(outputs, list) else None,
        **(more(engine) if more is not None else {}),
    }
    write(result)
