#!/usr/bin/env python3
"""Everything that is measured on a GPU, in one command on a machine with one (docs/gpu.md).

    python bench/gpu.py all [--budget 600] [--only STAGE ...]      everything, in stages with limits of their own
    python bench/gpu.py kernels [--quick]                          attention, small operations, sampling: all shapes

`all` runs the stages of bench/gpu_stages.py one after another, each in a process of its own. Their rows are
flushed to a file as they are measured, so that a stage which crashes or is killed costs its own rows only.

`kernels` takes less than 5 minutes.  It measures the card's copy rate and bf16 GEMM rate, checks every kernel on new
random numbers against float32, and times attention (bench/gpu_attention.py), small operations and sampling
(bench/gpu_ops.py).

Both require torch (2.11 or later), triton (3.6 or later), numpy, msgspec and xxhash, and `all` transformers and
pytest; this repository need not be installed.  They print a table and write a record to `--output`, to the folder
$OUT, or to bench/results/gpu.  The exit status is 1 if a check failed, but not if a target was missed.

`--device cpu` runs the same code with toy shapes in the Triton language's interpreter, to show that it works; times
are meaningless there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import gpu_rows
import gpu_stages

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "backend")]


def options() -> argparse.Namespace:
    names = [stage.name for stage in gpu_stages.STAGES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    everything = commands.add_parser("all", help="all stages, each in a process of its own")
    budget = f"seconds for all stages together; default {gpu_stages.BUDGET:g}, with --only the shares of those"
    everything.add_argument("--budget", type=float, help=budget)
    everything.add_argument("--only", nargs="+", choices=names, metavar="STAGE", help=f"of {', '.join(names)}")
    kernels = commands.add_parser("kernels", help="attention, small operations, sampling")
    kernels.add_argument("--quick", action="store_true", help="the shapes that have targets, fewer checks")
    for command in (everything, kernels):
        command.add_argument("--output", type=Path, help="the record: a .json file or a folder")
    stage = commands.add_parser("stage", help="one stage in this process, as `all` starts it")
    stage.add_argument("stage", choices=names)
    stage.add_argument("--rows", type=Path, required=True, help="append the rows to this file")
    stage.add_argument("--seconds", type=float, required=True, help="limit")
    for command in (everything, kernels, stage):
        command.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    for command in (everything, stage):
        command.add_argument("--tiny", action="store_true", help="toy shapes; the default with --device cpu")
    args = parser.parse_args()
    args.tiny = args.device == "cpu" or getattr(args, "tiny", False)
    return args


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def kernels(args: argparse.Namespace) -> int:
    import gpu_attention
    import gpu_ops
    import gpu_rates
    import torch

    start, origin = time.monotonic(), gpu_rows.about(args.device)
    device, card = torch.device(args.device), origin["card"]
    rates = {"copy": gpu_rates.copy_rate(device), "gemm": gpu_rates.gemm_rate(device)}
    print(f"{card}: copy {rates['copy'] / 1e9:.0f} GB/s read and written, bf16 GEMM {rates['gemm'] / 1e12:.1f} TFLOP/s")
    rows: list[dict[str, Any]] = []
    for part in (gpu_attention.run(device, args.quick, rates), gpu_ops.run(device, args.quick, rates["copy"])):
        for row in part:
            rows.append(row)
            print(gpu_rows.line(row), flush=True)
    checks = [row for row in rows if row["unit"] in ("error", "tokens")]
    failed = [row for row in checks if not row["passed"]]
    elapsed = time.monotonic() - start
    print(f"\n{card}, {elapsed:.0f} s: {len(checks) - len(failed)} of {len(checks)} checks passed")
    aimed = [row for row in rows if "target" in row and args.device == "cuda"]  # times on a CPU are meaningless
    for row in [*failed, *aimed]:
        print(gpu_rows.line(row))
    record = gpu_rows.write_record(args.output, "kernels", origin | dict(seconds=elapsed, rates=rates, rows=rows))
    print(f"\nrecord: {record}")
    return 1 if failed else 0


def main() -> int:
    args = options()
    gpu_rows.require_packages()
    if args.device == "cpu":
        # The Triton language reads this when it is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    elif not has_gpu():
        print("no CUDA device found; use --device cpu to see that the script works", file=sys.stderr)
        return 2
    return {"all": gpu_stages.run_all, "kernels": kernels, "stage": gpu_stages.run_stage}[args.what](args)


if __name__ == "__main__":
    sys.exit(main())
