#!/usr/bin/env python3
"""What a streamed response costs: CPU time of stub, server and client, and the gaps that a client sees.

    python bench/sending.py [--streams 32] [--tokens 300] [--step-ms 10] [--rounds 3] [--output FILE]

A real tritonserver whose engine process echoes the prompt (tests/support/fake_engine.py), one token a stream and
step, so that nothing but sending takes time.  The sides are `stream_interval: 1` and the default, "auto".
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

ROOT = Path(__file__).resolve().parents[1]
FAKE_ENGINE = ROOT / "tests" / "support" / "fake_engine.py"
CHECKPOINT = ROOT / "model_repository" / "demo" / "1" / "checkpoint"
SIDES: dict[str, dict[str, Any]] = {"stream_interval 1": {"stream_interval": 1}, "auto": {}}
PARTS = {"stub": "triton_python_backend_stub", "server": "tritonserver", "engine": "fake_engine.py"}


def write_repository(root: Path, options: dict[str, Any]) -> Path:
    """A repository with the model `echo`, whose interpreter runs the fake engine."""
    interpreter = root / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE_ENGINE} "$@"\n')
    interpreter.chmod(0o755)
    version = root / "repository" / "echo" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "inflight"\ninstance_group [ { kind: KIND_CPU } ]\n')
    settings = {"model": str(CHECKPOINT), "python_executable": str(interpreter), **options}
    (version / "model.json").write_text(json.dumps(settings))
    return root / "repository"


def cpu_seconds(session: int) -> dict[str, float]:
    """CPU time so far of each part of a server, by name."""
    from inflight_tools.processes import session_members

    seconds = dict.fromkeys(PARTS, 0.0)
    for pid in session_members(session):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        part = next((name for name, file in PARTS.items() if file in command), None)
        if part is not None:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            seconds[part] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def run(options: dict[str, Any], streams: int, tokens: int, step_ms: float) -> dict[str, Any]:
    from inflight_tools.launcher import TritonServer

    with tempfile.TemporaryDirectory() as folder, TritonServer(write_repository(Path(folder), options)) as server:
        stream_all(server.grpc_address, 4, 10, step_ms)
        assert server.process is not None
        before, own = cpu_seconds(server.process.pid), time.process_time()
        start = time.perf_counter()
        times = stream_all(server.grpc_address, streams, tokens, step_ms)
        wall = time.perf_counter() - start
        own = time.process_time() - own
        after = cpu_seconds(server.process.pid)
    gaps = sorted(b - a for own_times in times for a, b in itertools.pairwise(own_times))
    spent = {"client": own, **{part: after[part] - before[part] for part in PARTS}}
    count = sum(map(len, times))
    return {
        "responses": count,
        "seconds": wall,
        "us_per_response": {part: seconds / count * 1e6 for part, seconds in spent.items()},
        "us_per_token": {part: seconds / (streams * tokens) * 1e6 for part, seconds in spent.items()},
        "gap_ms": {"median": 1e3 * statistics.median(gaps), "p99": 1e3 * gaps[int(len(gaps) * 0.99)]},
    }


def stream_all(address: str, streams: int, tokens: int, step_ms: float) -> list[list[float]]:
    """Submit all requests at once on one connection; returns when the responses to each came."""
    import numpy as np
    import tritonclient.grpc as triton

    times: list[list[float]] = [[] for _ in range(streams)]
    left, failures, done = streams, [], threading.Event()

    def receive(result: Any, error: Exception | None) -> None:
        nonlocal left
        if error is not None:
            failures.append(error)
            return done.set()
        response = result.get_response()
        times[int(response.id)].append(time.perf_counter())
        left -= response.parameters["triton_final_response"].bool_param
        if not left:
            done.set()

    def tensor(name: str, kind: str, value: Any) -> Any:
        array = np.asarray([value], dtype={"BOOL": bool, "BYTES": object}[kind])
        found = triton.InferInput(name, array.shape, kind)
        found.set_data_from_numpy(array)
        return found

    params = json.dumps({"temperature": 0, "max_tokens": tokens, "ignore_eos": True}).encode()
    with triton.InferenceServerClient(address) as client:
        client.start_stream(receive)
        for number in range(streams):
            inputs = [
                tensor("text_input", "BYTES", b"the list of names and the places where they live"),
                tensor("stream", "BOOL", True),
                tensor("sampling_parameters", "BYTES", params),
                tensor("tenant", "BYTES", f"delay={step_ms / 1e3}".encode()),
            ]
            client.async_stream_infer("echo", inputs, request_id=str(number), enable_empty_final_response=True)
        done.wait()
        client.stop_stream()
    if failures:
        raise failures[0]
    return times


def table(runs: dict[str, list[dict[str, Any]]], value: Callable[[dict[str, Any]], dict[str, float]]) -> None:
    names = list(value(next(iter(runs.values()))[0]))
    for side, found in runs.items():
        medians = [statistics.median(value(one)[name] for one in found) for name in names]
        cells = "".join(f"{name} {median:7.1f}   " for name, median in zip(names, medians))
        print(f"  {side:<20}{cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(args.rounds):
        for side, options in SIDES.items():
            runs[side].append(run(options, args.streams, args.tokens, args.step_ms))
    print(f"{common.machine()}, {args.streams} streams, steps of {args.step_ms:g} ms, medians of {args.rounds} runs")
    for title in ("us_per_response", "us_per_token", "gap_ms"):
        print(title.replace("_", " "))
        table(runs, lambda one, title=title: one[title])
    common.record(args.output, runs, {k: v for k, v in vars(args).items() if k != "output"})


if __name__ == "__main__":
    main()
