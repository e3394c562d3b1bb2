#!/usr/bin/env python3
"""How long streams wait for their next token when engine processes die: by a request that kills each one, by SIGKILL.

    python bench/poison.py [--streams 40] [--rounds 8] [--backends DIR ...] [--cases ...] [--no-spare] [--output FILE]

Supervisor and output of the stub with real engine processes of the demo model; `tests/support/faulty_engine.py` makes
the poison.  The sides are folders that contain the package `inflight`, from the repository's root (default: `backend`),
so that an earlier commit's worktree can be compared in alternating runs.

    poison  one request ends each engine that computes its third token; until it has failed and all others go on
    kill    SIGKILL
    twice   SIGKILL, and again 0.1 s later, while the next engine loads
    early   SIGKILL as soon as the first engine is up; in the other cases it has been idle for ten seconds

With --no-spare each engine does its imports itself; the first one's start is the "load" of a run.  The CPU seconds are
those of all engine processes and of what they were made of, from start to stop.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common
import psutil

CASES = ("poison", "kill", "twice", "early")
IDLE_SECONDS = 10.0
MAX_TOKENS = 1900
PATIENCE = 300.0
sys.path.append(str(common.ROOT / "tests" / "support"))


class Client:
    """A `Responder` that records when tokens came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.error: tuple[str, str] | None = None
        self.ended = False

    def prepare(self, outputs: dict[str, Any], final: bool) -> Callable[[], None]:
        return partial(self.send, outputs, final)

    def send(self, outputs: dict[str, Any], final: bool) -> None:
        self.times.append(time.monotonic())
        self.ended = final

    def fail(self, code: str, message: str) -> None:
        self.error, self.ended = (code, message), True

    def is_cancelled(self) -> bool:
        return False

    def longest_gap(self, start: float) -> float:
        """Seconds between two responses, the second of them after `start`."""
        return max(b - a for a, b in itertools.pairwise(self.times) if b >= start)


def wait_until(done: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.002)


def busy() -> tuple[float, float]:
    """CPU time of all processes of the machine so far, and the time of its cores, in seconds."""
    times = psutil.cpu_times()
    whole = sum(times) - times.guest - times.guest_nice  # which user and nice contain
    return whole - times.idle - times.iowait, whole


def run(case: str, streams: int, no_spare: bool) -> common.Run:
    """One case in this process."""
    from faulty_engine import RAISES, write_interpreter
    from frontend_rig import RecordingStats, demo_tokenizer, make_request

    from inflight.config import EngineConfig
    from inflight.frontend.engine_client.supervisor import Supervisor
    from inflight.frontend.output.output_processor import OutputProcessor

    with tempfile.TemporaryDirectory() as folder:
        options = {
            "model": str(common.DEMO),
            "python_executable": str(write_interpreter(Path(folder))),
            "max_num_seqs": 64,
            "kv_cache_memory": "256MiB",
            "spare_engine": not no_spare,
        }
        supervisor = Supervisor(EngineConfig.from_dict(options), lambda level, line: print(line, file=sys.stderr))
        before = time.monotonic()
        supervisor.start()
        load = time.monotonic() - before
        stats = RecordingStats()
        output = OutputProcessor(demo_tokenizer(), supervisor, stats, lambda line: print(line, file=sys.stderr))
        output.start()
        supervisor.connect(output)

        if case != "early":
            time.sleep(IDLE_SECONDS)

        def opened(prompt: list[int], max_tokens: int) -> Client:
            client = Client()
            request = make_request(prompt, max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
            output.open(request, client)
            return client

        clients = [opened([300 + number % 50] * 8, MAX_TOKENS) for number in range(streams)]
        wait_until(lambda: all(client.times for client in clients))
        ticks, start, found = busy(), time.monotonic(), None
        if case == "poison":
            poison = opened([RAISES, 5, 6], 9)
            wait_until(lambda: poison.ended)
            assert poison.error is not None and "while it ran this request" in poison.error[1], poison.error
            found = time.monotonic() - start
        else:
            kill_engine(supervisor)
            if case == "twice":
                time.sleep(0.1)
                kill_engine(supervisor)
        last = time.monotonic()
        wait_until(lambda: all(client.times[-1] > last + 0.05 for client in clients))
        assert not any(client.ended for client in clients)
        used, total = (after - earlier for after, earlier in zip(busy(), ticks))
        supervisor.stop()
        output.stop("over")
    gaps = sorted(client.longest_gap(start) for client in clients)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "load_seconds": load,
        "wait_median": statistics.median(gaps),
        "wait_worst": gaps[-1],
        "found_after": found,
        "deaths": stats.deaths,
        "cpu_seconds": spent.ru_utime + spent.ru_stime,
        "machine_busy": used / max(1, total),
        "load_average": os.getloadavg()[0],
    }


def kill_engine(supervisor: Any) -> None:
    wait_until(lambda: supervisor._engine_process is not None)
    with contextlib.suppress(ProcessLookupError):
        os.kill(supervisor._engine_process.pid, signal.SIGKILL)


def in_backend(backend: str, case: str, **arguments: Any) -> common.Run:
    """One case in a fresh process that imports `inflight` from a folder."""
    import json

    paths = [str(common.ROOT / backend), str(common.HERE), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, __file__, "--side", case],
        input=json.dumps(arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    if common.ran_side(lambda case, arguments: run(case, **arguments)):
        return
    args = common.options(
        __doc__,
        streams=40,
        rounds=8,
        backends=["backend"],
        cases=common.choice(CASES),
        no_spare=False,
    )
    runs = common.alternate(
        [f"{case} {backend}" for case in args.cases for backend in args.backends],
        args.rounds,
        lambda side, _: in_backend(
            side.split(" ", 1)[1], side.split(" ", 1)[0], streams=args.streams, no_spare=args.no_spare
        ),
        lambda one: (
            f"next token after {one['wait_median']:5.2f} s (median stream), {one['wait_worst']:5.2f} s (worst); "
            f"{one['cpu_seconds']:.1f} CPU s, load {one['load_seconds']:.1f} s, machine {one['machine_busy']:.0%} busy"
        ),
    )
    found = common.medians(runs, *runs[next(iter(runs))][0])
    print(f"\n{common.machine()}, {args.streams} streams, medians of {args.rounds} alternating runs")
    for side, figures in found.items():
        print(
            f"  {side:<20} median stream {figures['wait_median']:.2f} s, worst {figures['wait_worst']:.2f} s, "
            f"start of an engine {figures['load_seconds']:.2f} s, {figures['deaths']:.0f} deaths, "
            f"{figures['cpu_seconds']:.1f} CPU s"
        )
    ratios = {}
    for case in args.cases if len(args.backends) == 2 else ():
        base, new = (runs[f"{case} {backend}"] for backend in args.backends)
        ratios[case] = {
            name: common.median_ratio(new, base, name) for name in ("wait_median", "wait_worst", "cpu_seconds")
        }
        print(f"  {case}: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios[case].items()))
    common.record(args, runs, medians=found, ratios=ratios)


if __name__ == "__main__":
    main()
