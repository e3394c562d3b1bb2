"""What the benchmarks share: checkpoint and workload on disk, runs in fresh processes, records."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# What the engine process sets for itself: with threads that spin at OpenMP's barriers, throughput collapses as soon as
# anything else runs on the cores.  Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
CACHE = Path(os.environ.get("INFLIGHT_BENCH_CACHE", Path.home() / ".cache" / "inflight-bench"))
CHECKPOINT = "llama-60m-rand"


def parser(description: str) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    result.add_argument("--requests", type=int, default=64, help="use this many of the workload's 128 requests")
    result.add_argument("--rounds", type=int, default=3, help="runs of each side, alternating")
    result.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads of each side")
    result.add_argument("--output", type=Path, help="write the record to this JSON file")
    return result


def checkpoint(dtype: str) -> str:
    """Directory of the llama with 60 M random parameters, generated once."""
    path = CACHE / (CHECKPOINT if dtype == "bfloat16" else f"{CHECKPOINT}-fp32")
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, HERE / "make_checkpoints.py", CACHE, CHECKPOINT], check=True)
    return str(path)


def workload(count: int | None, name: str = "b") -> list[dict[str, Any]]:
    """Requests `{id, prompt: token ids, out: tokens}`; prompts 16..2048, outputs lognormal(4.0, 0.8)."""
    path = CACHE / f"workload_{name}.json"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, HERE / "make_workload.py", CACHE], check=True, stdout=subprocess.DEVNULL)
    return json.loads(path.read_text())["requests"][:count]


def in_fresh_process(script: str, side: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run `script --side SIDE` with the arguments as JSON on stdin; its last output line is the result."""
    done = subprocess.run(
        [sys.executable, script, "--side", side],
        input=json.dumps(arguments),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def alternate(script: str, sides: list[str], arguments: dict[str, Any], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Alternate between the sides, `rounds` times each, so that drift of the machine affects all alike."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides:
            result = in_fresh_process(script, side, arguments)
            runs[side].append(result)
            print(f"round {number + 1}/{rounds}  {side:<20} {result['tokens_per_second']:8.1f} tokens/s", flush=True)
    return runs


def median_rate(runs: list[dict[str, Any]]) -> float:
    return statistics.median(run["tokens_per_second"] for run in runs)


def median_ratio(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """Median over the rounds of the paired ratio ours / theirs."""
    return statistics.median(a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(ours, theirs))


def compare(script: str, description: str, sides: dict[str, Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Main function of a benchmark: alternate between its sides, print and record each one's ratio to the first.

    Args:
        script: the file of the benchmark, which also calls this in its fresh processes, with `--side`.
        sides: name -> a run with the arguments {dtype, requests, threads}; the baseline first.
    """
    if "--side" in sys.argv:
        print(json.dumps(sides[sys.argv[sys.argv.index("--side") + 1]](json.load(sys.stdin))))
        return
    args = parser(description).parse_args()
    arguments = {"dtype": args.dtype, "requests": args.requests, "threads": args.threads}
    checkpoint(args.dtype)
    workload(1)
    runs = alternate(script, list(sides), arguments, args.rounds)
    baseline, *others = sides
    ratios = {side: median_ratio(runs[side], runs[baseline]) for side in others}
    print(f"\n{machine()}, {args.dtype}, {args.requests} requests, medians of {args.rounds} alternating runs")
    for side in sides:
        print(f"  {side:<20} {median_rate(runs[side]):8.1f} tokens/s")
    for side, ratio in ratios.items():
        print(f"  {side} / {baseline}: {ratio:.3f}")
    record(args.output, runs, arguments, ratio=ratios[others[-1]], ratios=ratios)


def record(path: Path | None, runs: dict[str, Any], arguments: dict[str, Any], **summary: Any) -> None:
    """Write the runs and what is needed to repeat them; None writes nothing."""
    if path is None:
        return
    content = {
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "machine": machine(),
        "versions": versions("inflight", "torch", "transformers", "numpy", "tritonclient"),
        "python": platform.python_version(),
        "arguments": arguments,
        **summary,
        "runs": runs,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def versions(*names: str) -> dict[str, str]:
    """The versions of those packages that are installed; what is only on PYTHONPATH has none."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def machine() -> str:
    """The CPU model and the number of cores that this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{model}, {len(os.sched_getaffinity(0))} cores"
