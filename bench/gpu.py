#!/usr/bin/env python3
"""Checks and times the GPU kernels, and compares the engine with generate(), in one command on a machine with a GPU.

    python bench/gpu.py kernels [--quick] [--output FILE]     attention, small operations, sampling
    python bench/gpu.py engine [--output FILE]                tokens/s of the engine, and of generate()

`kernels` takes less than 5 minutes and requires torch (2.11 or later), triton (3.6 or later) and numpy, but no
installation of this repository.  It measures the card's copy rate and bf16 GEMM rate, checks every kernel on new
random numbers against float32, and times attention (bench/gpu_attention.py), small operations and sampling
(bench/gpu_ops.py).  A short table of targets follows; the exit status is 1 if a check failed, but not if a
target was missed.  The record is written to bench/results/gpu_kernels_<card>.json, or to $OUT if that is set.

`engine` also requires transformers: it runs Inflight's EngineCore and transformers' generate() in static batches
on a checkpoint of Qwen3 0.6B's shape with random weights.

`--device cpu` runs the same code with tiny shapes in the Triton language's interpreter, to show that the script
works; times are meaningless there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "backend")]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kernels", "engine"])
    parser.add_argument("--quick", action="store_true", help="the shapes that have targets, fewer checks")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--output", type=Path, help="write the record there")
    return parser.parse_args()


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def card_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def versions() -> dict[str, str]:
    names = [name for name in ("torch", "triton", "numpy", "transformers") if find_spec(name)]
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def write(args: argparse.Namespace, card: str, record: dict[str, Any]) -> None:
    folder = Path(os.environ.get("OUT", ROOT / "bench" / "results"))
    slug = re.sub(r"[^a-z0-9]+", "-", card.lower().removeprefix("nvidia ")).strip("-")
    path = args.output or folder / f"gpu_{args.what}_{slug}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    about = dict(command=" ".join(["python", "bench/gpu.py", *sys.argv[1:]]), date=date.today().isoformat())
    path.write_text(json.dumps(about | dict(card=card, versions=versions()) | record, indent=1) + "\n")
    print(f"\nrecord: {path}")


def line(row: dict[str, Any]) -> str:
    """A row of the table: kernel, shape, time, achieved value and limit, target and verdict."""
    scales = {"bytes/s": (1e9, "GB/s"), "FLOP/s": (1e12, "TFLOP/s")}
    scale, unit = scales.get(row["unit"], (1.0, row["unit"]))
    spent = f"{row['microseconds']:9.1f} us" if "microseconds" in row else " " * 12
    if row["unit"] == "error":
        reached = f"{row['achieved']:.1e} of {row['limit']:.1e} allowed"
    elif row["unit"] == "tokens":
        reached = f"{row['achieved']} differ"
    else:
        reached = f"{row['achieved'] / scale:8.1f} of {row['limit'] / scale:8.1f} {unit:<7} {row['ratio']:5.2f}"
    notes = []
    if "over_flash" in row:
        notes.append(f"{row['over_flash']:.2f} x torch's flash")
    if "over_torch" in row:
        notes.append(f"{row['over_torch']:.1f} x torch")
    if "target" in row:
        notes.append(f"target {row['target']:g}")
    verdict = {True: "met", False: "MISSED", None: ""}[row.get("passed")]
    return f"{row['name']:<31} {row['shape']:<44} {spent} {reached:<36} {', '.join(notes)} {verdict}".rstrip()


def kernels(args: argparse.Namespace) -> int:
    import gpu_attention
    import gpu_ops
    import torch

    start = time.monotonic()
    device, card = torch.device(args.device), card_name(args.device)
    rates = {"copy": gpu_ops.copy_rate(device), "gemm": gpu_ops.gemm_rate(device)}
    print(f"{card}: copy {rates['copy'] / 1e9:.0f} GB/s read and written, bf16 GEMM {rates['gemm'] / 1e12:.1f} TFLOP/s")
    rows = gpu_ops.run(device, args.quick, rates["copy"]) + gpu_attention.run(device, args.quick)
    # For a prompt without context, the target is torch's flash attention.
    for row in rows:
        if row["name"] == "attention" and row["shape"] == "prefill 8K" and "over_flash" in row:
            row |= dict(target=1.0, passed=bool(row["over_flash"] >= 1.0))
    checks = [row for row in rows if row["unit"] in ("error", "tokens")]
    failed = [row for row in checks if not row["passed"]]
    for row in rows:
        print(line(row))
    elapsed = time.monotonic() - start
    print(f"\n{card}, {elapsed:.0f} s: {len(checks) - len(failed)} of {len(checks)} checks passed")
    aimed = [row for row in rows if "target" in row and args.device == "cuda"]  # times on a CPU are meaningless
    for row in [*failed, *aimed]:
        print(line(row))
    write(args, card, dict(seconds=elapsed, rates=rates, rows=rows))
    return 1 if failed else 0


def main() -> int:
    args = options()
    if args.device == "cpu":
        # The Triton language reads this when it is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    elif not has_gpu():
        print("no CUDA device found; use --device cpu to see that the script works", file=sys.stderr)
        return 2
    if args.what == "kernels":
        return kernels(args)
    import gpu_engine

    card = card_name(args.device)
    write(args, card, gpu_engine.run(args.device, args.quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())
