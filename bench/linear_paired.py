#!/usr/bin/env python3
"""CPU time of single linear layers with the CPU kernels of this commit and of another, and with torch's own.

    python bench/linear_paired.py --base FILE [--dtype float32] [--rounds 9] [--output FILE]

`--base` is `_cpu_kernels.so` of the other commit, which must have the same ABI.  The shapes are those of BERT-base's
layers.  All sides compute the same product in turn, on one thread, and both libraries must give the same bits.  CPU
time, unlike the clock, leaves out the time for which other programs have the core.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import common
from kernels_paired import _opened

if TYPE_CHECKING:
    from torch import Tensor

    from inflight.kernels.cpu.cpu_linear import PackedWeight

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
    from inflight.kernels.cpu.library import library

    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    libraries = {"base": _opened(args.base), "new": library()}
    runs: dict[str, dict[str, list[float]]] = {}
    for inputs, outputs in _SHAPES:
        weight, bias = torch.randn(outputs, inputs, dtype=dtype), torch.randn(outputs)
        packed = PackedWeight([weight], [bias])
        for rows in _ROWS:
            name = f"{inputs} to {outputs}, {rows} rows"
            work = _sides(libraries, packed, torch.randn(rows, inputs, dtype=dtype), (weight, bias.to(dtype)))
            operations = 2 * rows * inputs * outputs
            found = _in_turn(work, args.rounds, max(1, round(_OPERATIONS / operations)))
            assert torch.equal(work["base"](), work["new"]()), f"{name}: other bits"
            runs[name] = {side: [operations / one / 1e9 for one in seconds] for side, seconds in found.items()}
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


def _sides(
    libraries: dict[str, ctypes.CDLL], packed: PackedWeight, x: Tensor, plain: tuple[Tensor, Tensor]
) -> dict[str, Callable[[], Tensor]]:
    """The same product by each library and by torch; `plain` is the weight and its bias."""
    import torch

    from inflight.kernels.cpu.library import DTYPE_CODES

    def side(library: ctypes.CDLL) -> Callable[[], Tensor]:
        out = x.new_empty(len(x), packed.out_features)

        def multiply() -> Tensor:
            library.inflight_ops_linear(packed.address, x.data_ptr(), len(x), DTYPE_CODES[x.dtype], out.data_ptr(), 1)
            return out

        return multiply

    ours = {name: side(library) for name, library in libraries.items()}
    return {**ours, "torch": lambda: torch.nn.functional.linear(x, *plain)}


def _in_turn(work: dict[str, Callable[[], Tensor]], rounds: int, count: int) -> dict[str, list[float]]:
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
