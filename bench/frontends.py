#!/usr/bin/env python3
"""What a streamed response costs, against the number of stubs that share an engine process.

    python bench/overhead.py --frontends 1 2 4 [--requests 64] [--rounds 3] [--output FILE]

A real tritonserver on 127.0.0.1, with an engine process that makes a step each 30 ms without a model, streams to a
client on the same machine.  CPU time of each kind of process is divided by the responses: with cores to spare,
responses/s grow with the stubs as long as that stays the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

HERE = Path(__file__).parent
DEMO = HERE.parent / "model_repository" / "demo" / "1" / "checkpoint"
KINDS = ("server", "stubs", "keeper", "engine")
OUT = 200  # tokens a request


def write_repository(folder: Path, count: int) -> None:
    interpreter = folder / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "echo_engine.py"} "$@"\n')
    interpreter.chmod(0o755)
    version = folder / "repository" / "bench" / "1"
    version.mkdir(parents=True)
    group = f"instance_group [ {{ kind: KIND_CPU, count: {count} }} ]\n"
    (version.parent / "config.pbtxt").write_text(f'backend: "inflight"\n{group}')
    options = {"model": str(DEMO), "python_executable": str(interpreter), "max_num_seqs": 64}
    (version / "model.json").write_text(json.dumps(options))


def cpu_seconds(session: int) -> dict[str, float]:
    """CPU time so far of a server's processes, by kind."""
    from inflight_tools.processes import session_members

    found = dict.fromkeys(KINDS, 0.0)
    for pid in session_members(session):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            kind = "server"
            for mark, other in ((b"backend_stub", "stubs"), (b"keeper.py", "keeper"), (b"echo_engine", "engine")):
                if mark in command:
                    kind = other
            found[kind] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def run(count: int, num_requests: int) -> dict[str, Any]:
    from overhead import stream_all

    from inflight_tools.launcher import TritonServer

    requests = [{"id": k, "prompt": [300 + k % 50] * 16, "out": OUT} for k in range(num_requests)]
    with tempfile.TemporaryDirectory() as folder:
        write_repository(Path(folder), count)
        with TritonServer(Path(folder) / "repository") as server:
            assert server.process is not None
            stream_all(server.grpc_address, [{**request, "out": 4} for request in requests[:8]])
            before, start = cpu_seconds(server.process.pid), time.perf_counter()
            tokens, arrivals = stream_all(server.grpc_address, requests)
            seconds = time.perf_counter() - start
            responses = sum(map(len, arrivals))
            after = cpu_seconds(server.process.pid)
    cost = {kind: (after[kind] - before[kind]) / responses * 1e6 for kind in KINDS}
    return {"frontends": count, "responses": responses, "tokens": tokens, "seconds": seconds, "cpu_microseconds": cost}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--frontends", type=int, nargs="+", required=True, help="numbers of stubs")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each number, alternating")
    parser.add_argument("--output", type=Path, help="write the record to this JSON file")
    args = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {str(count): [] for count in args.frontends}
    for _ in range(args.rounds):
        for count in args.frontends:
            runs[str(count)].append(run(count, args.requests))
    print(f"{common.machine()}, {args.requests} requests of {OUT} tokens, medians of {args.rounds} alternating runs")
    print("stubs  responses/s  CPU time of a response, microseconds: " + ", ".join(KINDS))
    medians = {}
    for name, found in runs.items():
        rate = statistics.median(one["responses"] / one["seconds"] for one in found)
        cost = {kind: statistics.median(one["cpu_microseconds"][kind] for one in found) for kind in KINDS}
        medians[name] = {"responses_per_second": rate, "cpu_microseconds": cost}
        print(f"{name:>5}  {rate:11.0f}  " + "  ".join(f"{cost[kind]:8.1f}" for kind in KINDS))
    common.record(args.output, runs, {"frontends": args.frontends, "requests": args.requests}, medians=medians)


if __name__ == "__main__":
    main()
