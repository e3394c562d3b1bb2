"""`bench/gpu.py all`: stages as subprocesses with limits of their own, in one budget of seconds.

A stage is a generator of rows in a module of this folder; each row is appended to a file as it is measured, so a stage
that crashes, hangs or is killed costs its own rows that are not measured yet, and nothing else.  This module starts
the stages and holds nothing on the card.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_rows
from gpu_rows import Run

__all__ = ["BUDGET", "STAGES", "Stage", "limits", "run_all", "run_command", "run_stage"]

ROOT = Path(__file__).resolve().parents[1]
_GRACE = 3.0  # seconds between the request to end and the kill


@dataclass(frozen=True)
class Stage:
    """A part of the run.

    Attributes:
        seconds: its share of the budget; what earlier stages leave is added.
        rows: "module:function" of a generator that takes a `Run`.
    """

    name: str
    seconds: float
    rows: str
    about: str


# In the order of what a first run must know.  The shares are estimates for an H200 and a machine that has just started,
# not measured: 20 s to import torch and transformers and to start CUDA in the first process (6 s in later ones), 10 s
# to load and capture an 8B, 20 to 30 s to compile a model's kernels for the first time.
STAGES = (
    # 20 s of imports, cuBLAS, one compilation, 10 s of measurements.
    Stage("rates", 45, "gpu_rates:rows", "versions; the card's copy, read and GEMM rates"),
    # 8 to 11 minutes one after another; seven processes, then 40 s for the tests of memory.
    Stage("tests", 240, "gpu_tests:tests", "tests/gpu in seven processes"),
    # Two models in two modes, 13 batches of 110 steps of 2 to 40 ms each, with what they compile.
    Stage("decode", 110, "gpu_decode:decode", "decode steps of an 8B over their floor, eager and with CUDA graphs"),
    Stage("kernels", 90, "gpu_stages:kernels", "the kernels' times that have targets, and their checks"),
    Stage("prefill", 40, "gpu_decode:prefill", "prefills of an 8B over the GEMM rate"),
    # Some 20 engines of 6 to 8 s each.
    Stage("options", 150, "gpu_options:options", "each switch of the engine on, over all of them off"),
    # Four engines of 6 to 8 s each, with twice the graphs in two of them; some 25 batches of 64 steps.
    Stage("lora", 70, "gpu_lora:lora", "adapters in decode steps of a 0.6B and of half an 8B, over none"),
    # 15 s to load; a pair of runs takes 20 to 60 s, nearly all of it transformers'.
    Stage("serve", 110, "gpu_engine:serve", "256 requests to a 0.6B: this engine, transformers' continuous batching"),
    Stage("arrivals", 55, "gpu_engine:arrivals", "Poisson arrivals at an 8B with and without prompts of 12K tokens"),
)
BUDGET = sum(stage.seconds for stage in STAGES)


def limits(stages: Sequence[Stage], index: int, seconds_left: float, budget: float) -> float:
    """Time limit of stage `index` in seconds: what the shares of the later stages leave."""
    scale = budget / sum(stage.seconds for stage in stages)
    return max(0.0, seconds_left - scale * sum(stage.seconds for stage in stages[index + 1 :]))


def run_command(command: list[str], limit: float) -> str:
    """Run a process, and end it and its children after `limit` seconds.

    Returns:
        "ok", "killed after N s", "exit status N" or "killed by SIGNAL".
    """
    # A process group, so that compilers and test runners go with it; not a session, so that it ends with ours.
    process = subprocess.Popen(command, preexec_fn=os.setpgrp)
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"killed after {limit:.0f} s"
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}" if status else "ok"


def run_stage(args: argparse.Namespace) -> int:
    """`bench/gpu.py stage NAME`, in a process of its own: append the stage's rows to `--rows`."""
    stage = next(stage for stage in STAGES if stage.name == args.stage)
    module, _, function = stage.rows.partition(":")
    # Before the limit, so that the stage can end by itself.
    run = Run(args.device, args.tiny, time.monotonic() + args.seconds - min(_GRACE, args.seconds / 10), args.rows)
    origin = {"stage": stage.name, **gpu_rows.about(args.device)}
    try:
        for row in getattr(importlib.import_module(module), function)(run):
            gpu_rows.append(args.rows, origin | row)
            print(gpu_rows.line(row), *gpu_rows.kernel_lines(row), sep="\n", flush=True)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        gpu_rows.append(args.rows, origin | dict(name=stage.name, shape="", status="failed", why=why))
        raise
    return 0


def run_all(args: argparse.Namespace) -> int:
    """All stages, or those in `args.only`, then a table and the record.

    Returns:
        1 if a check failed or a stage did not end by itself with status 0, else 0; missed targets do not count.
    """
    stages = [stage for stage in STAGES if not args.only or stage.name in args.only]
    budget = args.budget or sum(stage.seconds for stage in stages)
    folder = args.output or gpu_rows.folder()
    folder = folder.parent if folder.suffix == ".json" else folder
    folder.mkdir(parents=True, exist_ok=True)
    what = "-".join(args.only) if args.only else "all"
    rows_file = folder / f"gpu_{what}_{time.time_ns()}.rows.jsonl"  # an earlier run that was killed keeps its own
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the `finally` below
    end = time.monotonic() + budget
    ended: list[dict[str, Any]] = []
    try:
        for index, stage in enumerate(stages):
            limit = limits(stages, index, end - time.monotonic(), budget)
            print(f"\n== {stage.name}: {stage.about}; at most {limit:.0f} s", flush=True)
            command = [sys.executable, str(ROOT / "bench" / "gpu.py"), "stage", stage.name, "--rows", str(rows_file)]
            command += ["--seconds", str(limit), "--device", args.device, *(["--tiny"] if args.tiny else [])]
            begun = time.monotonic()
            ended.append({"stage": stage.name, "status": "interrupted", "limit": limit})
            ended[-1]["status"] = run_command(command, limit) if limit >= 1 else "left out: no time"
            ended[-1]["seconds"] = time.monotonic() - begun
    finally:
        rows = gpu_rows.read(rows_file)
        origin: dict[str, Any] = {"card": "unknown"}
        if rows:
            origin = {key: rows[0][key] for key in ("card", "date", "versions")}
        record = gpu_rows.write_record(args.output, what, origin | dict(budget=budget, stages=ended, rows=rows))
        print(f"\n{', '.join([origin['card'], *map(' '.join, origin.get('versions', {}).items())])}")
        _print_table(ended, rows)
        print(f"\nrecord: {record}")
    rows_file.unlink(missing_ok=True)  # the record has them all
    failed = any(row.get("status") == "failed" for row in rows) or any(map(_failed_check, rows))
    return 1 if failed or any(stage["status"] != "ok" for stage in ended) else 0


def _failed_check(row: dict[str, Any]) -> bool:
    return row.get("unit") in ("error", "tokens", "tests") and not row["passed"]


def _print_table(ended: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """Per stage its end and its rows; checks that passed are only counted."""
    for stage in ended:
        stage_rows = [row for row in rows if row["stage"] == stage["stage"]]
        shown = [row for row in stage_rows if row.get("unit") not in ("error", "tokens", "tests") or _failed_check(row)]
        passed = f", {len(stage_rows) - len(shown)} checks passed" if len(stage_rows) > len(shown) else ""
        print(f"\n== {stage['stage']}: {stage['status']}, {stage.get('seconds', 0):.0f} s{passed}")
        for row in shown:
            print(gpu_rows.line(row))


def kernels(run: Run) -> Iterator[dict[str, Any]]:
    """Stage `kernels`: the quick part of `bench/gpu.py kernels`, attention first, which has most of the targets."""
    import gpu_attention
    import gpu_ops
    import gpu_rates
    import torch

    device, rates = torch.device(run.device), gpu_rates.measured(run)
    for part in (gpu_attention.run(device, True, rates), gpu_ops.run(device, quick=True, rate=rates["copy"])):
        for row in part:
            if run.tiny and "target" in row:
                del row["target"], row["passed"]
            yield row
