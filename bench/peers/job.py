"""The job of a run, for the scripts in this folder, which `bench/cpu.py` starts with each engine's interpreter.

    python run_NAME.py JOB.json

The job has: `checkpoint` (a directory), `requests` ({id, prompt, out}, and perhaps temperature and `adapter`, the
folder of a LoRA adapter), `warm_up` (the same),
`weights` ("bf16" or "fp32"), `kv` ("bf16", "fp32" or "u8"), `threads`, `max_num_seqs`, `kv_gib`, `started` (seconds
since the epoch when the process was spawned), `result` (the file to write), `options` (for this engine only), and
perhaps `batches` (name -> lists of requests, which are run one list after the other and timed, before `requests`).

Only the standard library is used, so that a peer's environment needs nothing else (hence /proc and not psutil).
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

Generate = Callable[[Any, list[dict[str, Any]]], list[list[int]]]
TORCH_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def read() -> dict[str, Any]:
    return json.loads(Path(sys.argv[1]).read_text())


def write(result: dict[str, Any]) -> None:
    Path(read()["result"]).write_text(json.dumps(result))


def cpu_seconds() -> float:
    """CPU time so far of this process and its living descendants."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # the name before it can contain spaces
        except OSError:
            continue  # the process has ended
        pid = int(stat.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    found = {os.getpid()}
    while below := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= below
    return sum(ticks[pid] for pid in found) / os.sysconf("SC_CLK_TCK")


def peak_rss() -> int:
    """Peak resident memory of this process in bytes (`ru_maxrss` would start at its parent's)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def checked(engine: Any, generate: Generate, requests: list[dict[str, Any]]) -> list[list[int]]:
    """The outputs.  Raises AssertionError if a request did not get exactly the requested number of tokens."""
    outputs = generate(engine, requests)
    expected, got = [request["out"] for request in requests], list(map(len, outputs))
    assert got == expected, f"expected {expected} tokens, got {got}"
    return outputs


def timed(engine: Any, generate: Generate, lists: list[list[dict[str, Any]]]) -> float:
    """Seconds for the lists of requests, one list after the other."""
    start = time.perf_counter()
    for requests in lists:
        checked(engine, generate, requests)
    return time.perf_counter() - start


def run(
    packages: list[str],
    load: Callable[[dict[str, Any]], Any],
    generate: Generate,
    more: Callable[[Any], dict[str, Any]] | None = None,
) -> None:
    """Load, warm up, time one `generate` over all requests, and write the result.

    Args:
        packages: distributions whose versions are recorded.
        load: job -> engine, ready for requests.
        generate: engine, requests -> output token ids in the order of the requests; greedy unless a request has a
            temperature, ignoring the end of sequence, all submitted at once.
        more: engine -> further parts of the result; called last.

    Raises:
        AssertionError: a request did not get exactly the requested number of tokens.
    """
    task = read()
    engine = load(task)
    ready_seconds = time.time() - task["started"]
    generate(engine, task["warm_up"])
    batches = {name: timed(engine, generate, lists) for name, lists in task.get("batches", {}).items()}
    start, busy = time.perf_counter(), cpu_seconds()
    outputs = checked(engine, generate, task["requests"])
    seconds, busy = time.perf_counter() - start, cpu_seconds() - busy
    peak = peak_rss()
    tokens = sum(map(len, outputs))
    result = {
        "seconds": seconds,
        "cpu_seconds": busy,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "ready_seconds": ready_seconds,
        "peak_rss": peak,
        "batches": batches,
        "versions": {name: version(name) for name in packages},
        "outputs": outputs,
        **(more(engine) if more is not None else {}),
    }
    write(result)
