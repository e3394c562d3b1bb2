#!/usr/bin/env python3
"""Compares Inflight with the installed CPU engines: same checkpoint, requests, threads and concurrency.

    python bench/cpu.py --workload b --weights bf16 --rounds 3 --budget 1200 [--peer openvino=PYTHON ...]

Workload a is 32 requests to a model with the shape of Qwen3-0.6B, 16 at a time; b is 128 requests to a llama with 60 M
parameters, 32 at a time; all greedy, ignoring the end of sequence, submitted at once. Every run is a fresh process, and
the engines alternate, so that drift of the machine affects all alike. An engine fails unless its outputs have exactly
the requested lengths. The record (`--output`) is written after each run; runs that do not fit the budget are skipped
and listed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import common
import cpu_engines
import cpu_floor
import cpu_report
from cpu_engines import ENGINES, RunFailed


@dataclass(frozen=True)
class CpuWorkload:
    """Requests of `workload_NAME.json`; `kv_gib` is enough for the KV of all concurrent requests in bf16."""

    name: str
    checkpoint: str
    max_num_seqs: int
    kv_gib: int


TORCH_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
WORKLOADS = {"a": CpuWorkload("a", "qwen3-0.6b-rand", 16, 4), "b": CpuWorkload("b", "llama-60m-rand", 32, 1)}


@dataclass
class Budget:
    """Time limit for all runs together, in seconds."""

    seconds: float
    started: float = field(default_factory=time.monotonic)
    longest: dict[str, float] = field(default_factory=dict)

    def limit(self, now: float) -> float:
        """Time limit in seconds of a run that starts at `now`."""
        return self.started + self.seconds - now

    def fits(self, name: str, now: float) -> bool:
        """Whether a run as long as the engine's longest so far fits; 5 s for an engine that has not run yet."""
        return self.limit(now) >= self.longest.get(name, 5.0)

    def ran(self, name: str, seconds: float) -> None:
        self.longest[name] = max(seconds, self.longest.get(name, 0.0))


def make_task(workload: CpuWorkload, args: argparse.Namespace) -> dict[str, Any]:
    """The task for every engine; `cpu_engines.run` adds what differs between runs."""
    requests = common.workload(args.requests, workload.name)
    return {
        "requests": requests,
        "warm_up": common.short(requests),
        "weights": args.weights,
        "kv": args.kv,
        "threads": args.threads,
        "max_num_seqs": workload.max_num_seqs,
        "kv_gib": workload.kv_gib * (2 if args.kv == "fp32" else 1),
    }


class Comparison:
    """One workload at one precision; `record` is what gets stored."""

    def __init__(self, workload: CpuWorkload, args: argparse.Namespace) -> None:
        self.args = args
        self.key = f"{workload.name} {args.weights}/{args.kv}"
        self.folder = Path(common.checkpoint(workload.checkpoint, TORCH_DTYPES[args.weights]))
        self.task = make_task(workload, args)
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self.left_out: dict[str, str] = {}
        self.budget = Budget(args.budget)
        self.rates = cpu_floor.Rates(0.0, 0.0)
        self.steps: list[cpu_floor.Step] = []  # of our first run, as are the outputs
        self.outputs: list[list[int]] = []
        requests = self.task["requests"]
        self.record: dict[str, Any] = {
            "command": args.command,
            "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
            "machine": common.machine(),
            "threads": args.threads,
            "requests": len(requests),
            "prompt_tokens": sum(len(request["prompt"]) for request in requests),
            "output_tokens": sum(request["out"] for request in requests),
        }

    def find(self, names: list[str]) -> dict[str, tuple[str, str]]:
        """name -> (interpreter, checkpoint) of the engines that can run; the others are listed with the reason."""
        weights, kv = self.args.weights, self.args.kv
        found = {}
        for name in names:
            try:
                if (weights, kv) not in ENGINES[name].precisions:
                    raise RunFailed(f"has no {weights} weights with {kv} KV")
                python = cpu_engines.interpreter(name, self.args.peer)
                found[name] = python, str(cpu_engines.checkpoint(name, python, self.folder))
            except RunFailed as error:  # noqa: PERF203
                self.leave_out(name, str(error))
        return found

    def leave_out(self, name: str, reason: str) -> None:
        self.left_out[name] = reason
        print(f"left out: {name}: {reason}", flush=True)

    def measure_rates(self) -> None:
        """Measure the machine again and keep the best rates, since disturbances only ever slow it down."""
        now = cpu_floor.measure(self.args.weights, self.args.threads)
        self.rates = cpu_floor.Rates(max(self.rates.read, now.read), max(self.rates.multiply, now.multiply))

    @property
    def floor(self) -> float | None:
        """Least seconds that the machine needs for our steps; None before our first run."""
        if not self.steps:
            return None
        shape = cpu_floor.ModelShape.from_checkpoint(self.folder)
        return cpu_floor.floor_seconds(shape, self.steps, self.args.weights, self.args.kv, self.rates)

    def run_rounds(self, engines: dict[str, tuple[str, str]]) -> None:
        """Run all rounds of all engines within the budget; the record is stored after each run."""
        for number in range(1, self.args.rounds + 1):
            for name in engines:
                if number > 1 and name in self.args.once:
                    continue
                result = self._run(name, engines, f"round {number}")
                if result is not None:
                    self._take(name, result)
                    rate = result["tokens_per_second"]
                    print(f"round {number}/{self.args.rounds}  {name:<16}{rate:>9.1f} tokens/s", flush=True)
                    self.store()

    def _run(self, name: str, engines: dict[str, tuple[str, str]], what: str, **more: Any) -> common.Run | None:
        """A run within the budget; None if it failed, now or earlier: one failure excludes the engine."""
        if name not in engines or name in self.left_out:
            return None
        python, path = engines[name]
        task = {**self.task, "checkpoint": path, "options": self.args.option.get(name, {}), **more}
        start = time.monotonic()
        limit = self.budget.limit(start)
        if not self.budget.fits(name, start):
            self.leave_out(name, f"{what} does not fit into the {max(0.0, limit):.0f} s left of the budget")
            return None
        try:
            result = cpu_engines.run(name, python, task, limit)
        except RunFailed as error:
            self.leave_out(name, f"{what}: {error}")
            return None
        self.budget.ran(name, time.monotonic() - start)
        return result

    def _take(self, name: str, result: dict[str, Any]) -> None:
        outputs, steps = result.pop("outputs"), result.pop("steps", None)
        if steps is not None:
            result["num_steps"] = len(steps)
            if not self.steps:
                self.steps, self.outputs = steps, outputs
        elif outputs is not None and self.outputs:
            same = sum(theirs == ours for theirs, ours in zip(outputs, self.outputs))
            result["requests_with_our_tokens"] = same
        self.runs.setdefault(name, []).append(result)

    def explain(self, engines: dict[str, tuple[str, str]]) -> None:
        """Record where the time of our steps goes, over the first quarter of the requests."""
        requests = self.task["requests"][: max(8, len(self.task["requests"]) // 4)]
        result = self._run(cpu_report.OURS, engines, "breakdown of our time", requests=requests, profile=True)
        if result is not None:
            self.record["breakdown"] = result["breakdown"]
        self.store()

    def store(self) -> None:
        self.record |= {
            "rates": asdict(self.rates),
            "floor_seconds": self.floor,
            "engines": cpu_report.summarise(self.runs, self.floor),
            "left_out": self.left_out,
            "runs": self.runs,
        }
        if self.args.output is None:
            return
        record = cpu_report.store(self.args.output, self.key, self.record)
        if importlib.util.find_spec("matplotlib"):
            cpu_report.plot(record, self.args.output.with_suffix(".png"))


def main() -> None:
    args = parse()
    comparison = Comparison(WORKLOADS[args.workload], args)
    comparison.measure_rates()
    print(f"{comparison.key}, {common.machine()}, {args.threads} threads", flush=True)
    engines = comparison.find(args.engines)
    comparison.run_rounds(engines)
    comparison.measure_rates()
    if args.breakdown:
        comparison.explain(engines)
    comparison.store()
    read, multiply = comparison.rates.read / 1e9, comparison.rates.multiply / 1e9
    print(f"\n{comparison.key}, {len(comparison.task['requests'])} requests, medians of alternating runs")
    print(f"the machine reads {read:.1f} GB/s and multiplies {multiply:.0f} GFLOP/s")
    print(cpu_report.table(comparison.record["engines"], comparison.left_out))
    if "breakdown" in comparison.record:
        print(f"\nbreakdown of our time\n{cpu_report.breakdown_lines(comparison.record['breakdown'])}")
    if reason := comparison.left_out.get(cpu_report.OURS):  # a run or the breakdown
        sys.exit(f"bench/cpu.py: {cpu_report.OURS}: {reason}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse options; `peer` is {name: interpreter}, `option` {name: {key: value}}, `command` goes into the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="b")
    parser.add_argument("--weights", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--kv", choices=["bf16", "fp32", "u8"], help="default: like the weights")
    every = ",".join(ENGINES)
    parser.add_argument("--engines", default=every, help=f"default, in order of expected speed: {every}")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="interpreter of a peer")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME:KEY=JSON", help="option for a single engine"
    )
    parser.add_argument("--requests", type=int, help="use only this many requests of the workload")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--once", default="", metavar="NAME,...", help="engines that run only in the first round")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for all runs together")
    parser.add_argument("--no-breakdown", dest="breakdown", action="store_false")
    parser.add_argument("--output", type=Path, help="update this comparison in the record, and the plot beside it")
    args = parser.parse_args(argv)
    args.kv = args.kv or args.weights
    args.engines = args.engines.split(",")
    args.once = args.once.split(",") if args.once else []
    unknown = sorted({*args.engines, *args.once} - set(ENGINES))
    if unknown:
        parser.error(f"--engines, --once: unknown engine {unknown[0]!r}; choose from {', '.join(ENGINES)}")
    try:
        args.peer = dict(entry.split("=", 1) for entry in args.peer)
        args.option = _options(args.option)
    except ValueError as error:
        parser.error(f"--peer NAME=PYTHON or --option NAME:KEY=JSON: {error}")
    # Without the paths of interpreters, which differ between machines.
    words = sys.argv[1:] if argv is None else argv
    args.command = " ".join(
        ["python bench/cpu.py", *(re.sub(r"^(--peer=)?([\w-]+=)/.*", r"\1\2PYTHON", w) for w in words)]
    )
    return args


def _options(entries: list[str]) -> dict[str, dict[str, Any]]:
    options: dict[str, dict[str, Any]] = {}
    for entry in entries:
        name, assignment = entry.split(":", 1)
        key, value = assignment.split("=", 1)
        options.setdefault(name, {})[key] = json.loads(value)
    return options


if __name__ == "__main__":
    main()
