"""The best rates of the card: bytes per second of a copy and of reading, FLOP/s of a bf16 matrix product.

Everything else in bench/gpu*.py is compared with these.  Requires torch and triton only.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from gpu_rows import Run
from torch import Tensor

__all__ = ["FLUSH_BYTES", "copy_rate", "gemm_rate", "measured", "read_rate", "rows", "seconds"]

# Operands of one kernel take at least this much together: several times the L2 cache of any card.
FLUSH_BYTES = 2**29
_READ_BLOCK = 8192  # integers per program: 16 bytes per thread and load, eight loads in flight


def seconds(calls: Sequence[Callable[[], Any]], device: torch.device, rounds: int = 15) -> float:
    """Median time of one call; all are captured in one graph.  On a CPU they run once."""
    if device.type == "cpu":
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times = []
        for _ in range(rounds + 3):
            begun.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            times.append(begun.elapsed_time(ended) / 1e3 / len(calls))
    return statistics.median(times[3:])


def _random_bytes(device: torch.device) -> Tensor:
    """1 GiB, or 1 MiB on a CPU."""
    return torch.randint(0, 255, (2**30 if device.type == "cuda" else 2**20,), dtype=torch.uint8, device=device)


def copy_rate(device: torch.device) -> float:
    """Bytes read and written per second by a large copy."""
    source = _random_bytes(device)
    target = torch.empty_like(source)
    return 2 * len(source) / seconds([lambda: target.copy_(source)], device)


@triton.jit
def _max_kernel(source, largest, BLOCK: tl.constexpr):
    """Largest of each `BLOCK` integers; their sum would overflow, which triton 3.6's interpreter refuses."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(largest + tl.program_id(0), tl.max(tl.load(source + offsets), axis=0))


def read_rate(device: torch.device) -> float:
    """Bytes read per second, with almost nothing written: the better of a kernel of ours and torch's sum.

    A decode step reads weights and KV, so its floor is set by this rate and not by that of a copy.
    """
    source = _random_bytes(device).view(torch.int32)
    largest = source.new_empty(len(source) // _READ_BLOCK)
    ours = seconds([lambda: _max_kernel[(len(largest),)](source, largest, BLOCK=_READ_BLOCK, num_warps=8)], device)
    numbers, total = torch.rand(len(source), device=device), torch.empty((), device=device)
    by_torch = seconds([lambda: torch.sum(numbers, dim=0, out=total)], device)
    return 4 * len(source) / min(ours, by_torch)


def gemm_rate(device: torch.device) -> float:
    """FLOP/s of a bf16 matrix product of random numbers."""
    size = 8192 if device.type == "cuda" else 64
    left, right = torch.randn(2, size, size, dtype=torch.bfloat16, device=device).unbind()
    out = torch.empty_like(left)
    return 2 * size**3 / seconds([lambda: torch.matmul(left, right, out=out)], device)


_RATES = {"copy": (copy_rate, "bytes/s"), "read": (read_rate, "bytes/s"), "gemm": (gemm_rate, "FLOP/s")}


@functools.cache
def measured(run: Run) -> dict[str, float]:
    """The rates "copy", "read" and "gemm": those in the file of rows if stage `rates` has run, else new ones."""
    known = {row["rate"]: row["achieved"] for row in run.rows_so_far() if "rate" in row}
    device = torch.device(run.device)
    return {name: known.get(name) or rate(device) for name, (rate, _) in _RATES.items()}


def rows(run: Run) -> Iterator[dict[str, Any]]:
    """Stage `rates`."""
    words = {"copy": "read and written", "read": "only read", "gemm": "square matrices, bf16"}
    for name, (rate, unit) in _RATES.items():
        achieved = rate(torch.device(run.device))
        yield dict(name=f"rate of the card: {name}", rate=name, shape=words[name], unit=unit, achieved=achieved)
