#!/usr/bin/env python3
"""CPU time of single linear layers with the CPU kernels of this commit and of another, and with torch's own.

    python bench/linear_paired.py --base FILE [--dtype float32] [--rounds 9] [--output FILE]

`--base` is `_cpu_kernels.so` of the other commit, which must have the same ABI.  The shapes are those of BERT-base's
layers.  All sides compute the same product in turn, on one thread, and both libraries must give the same bits.  CPU
time, unlike the clock, leaves out the time for which other programs have the core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import common
from kernels_paired import _opened

_SHAPES = ((768, 768), (768, 3072), (3072, 768))
_ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096)
_OPERATIONS = 5e9  # of a sample, at least


def main() -> None:
    args = common.options(
        __doc__,
        base=dict(required=True, metavar="FILE", help="the other commit's _cpu_kernels.so"),
        dtype=common.choice(("float32", "float16", "bfloat16"), "float32"),
        rounds=9,
    )
    import torch

    from inflight.kernels.cpu.cpu_linear import PackedWeight
    from inflight.kernels.cpu.library import DTYPE_CODES, library

    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    libraries = {"base": _opened(args.base), "new": library()}
    runs: dict[str, dict[str, list[float]]] = {}
    for inputs, outputs in _SHAPES:
        weight, bias = torch.randn(outputs, inputs, dtype=dtype), torch.randn(outputs)
        packed, own = PackedWeight([weight], [bias]), bias.to(dtype)
        for rows in _ROWS:
            x = torch.randn(rows, inputs, dtype=dtype)
            out = {side: torch.empty(rows, outputs, dtype=dtype) for side in libraries}

            def multiply(side: str) -> None:
                libraries[side].inflight_ops_linear(
                    packed.address, x.data_ptr(), rows, DTYPE_CODES[dtype], out[side].data_ptr(), 1
                )

            work: dict[str, Callable[[], object]] = {
                "base": lambda: multiply("base"),
                "new": lambda: multiply("new"),
                "torch": lambda: torch.nn.functional.linear(x, weight, own),
            }
            operations = 2 * rows * inputs * outputs
            found = _in_turn(work, args.rounds, max(1, round(_OPERATIONS / operations)))
            assert torch.equal(out["base"], out["new"]), f"{rows} rows, {inputs} to {outputs}: other bits"
            name = f"{inputs} to {outputs}, {rows} rows"
            runs[name] = {side: [operations / seconds / 1e9 for seconds in samples] for side, samples in found.items()}
            print(f"  {name:<26} {_shown(runs[name])}", flush=True)
    ratios = {
        name: {
            side: statistics.median(new / other for new, other in zip(found["new"], found[side]))
            for side in ("base", "torch")
        }
        for name, found in runs.items()
    }
    instruction_set = libraries["new"].inflight_instruction_set().decode()
    common.record(args, runs, unit="GFLOP per second of CPU time", instruction_set=instruction_set, ratios=ratios)


def _in_turn(work: dict[str, Callable[[], object]], rounds: int, count: int) -> dict[str, list[float]]:
    """Seconds of CPU time of one call, by side."""
    found: dict[str, list[float]] = {side: [] for side in work}
    for number in range(rounds + 1):
        for side in list(work) if number % 2 == 0 else reversed(work):
            began = time.process_time()
            for _ in range(count):
                work[side]()
            if number > 0:  # the first one warms up
                found[side].append((time.process_time() - began) / count)
    return found


def _shown(found: dict[str, list[float]]) -> str:
    return "   ".join(f"{side} {statistics.median(samples):.1f}" for side, samples in found.items())


if __name__ == "__main__":
    main()
