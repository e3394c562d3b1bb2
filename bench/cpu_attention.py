#!/usr/bin/env python3
"""The CPU attention kernel compared with the machine's limits: memory in decodes, matrix products in prefills.

    python bench/cpu_attention.py [--threads N] [--dtype bfloat16] [--kv auto int8] [--rounds 7] [--output record.json]

A decode reads every key and value once, so its limit is the time to read that many bytes (torch's sum over a
large tensor).  A prefill is limited by multiplications: it is compared with torch.matmul, counting only the
causal half of the products.  Measurements of machine and kernel, with each kind of KV cache, alternate; each is
the best of the rounds, since disturbances only ever slow it down.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import common
import torch
from attention_batch import flops_of, metadata_of, scattered_blocks

from inflight.attention.base import AttentionBackend, LayerSpec
from inflight.attention.dtypes import KV_DTYPES
from inflight.attention.reference import ReferenceAttention
from inflight.kernels.cpu.cpu_attention import CpuAttention
from inflight.kernels.cpu.library import allocate, instruction_set, use_instruction_set

BLOCK_SIZE = 16
# name -> query heads, KV heads, head size
SHAPES = {"8/4 x 64": (8, 4, 64), "16/8 x 128": (16, 8, 128), "32/8 x 128": (32, 8, 128)}
# name -> context, new tokens, of each request
BATCHES = {
    "decode 32 x 1K": ([1024] * 32, [1] * 32),
    "decode 8 x 8K": ([8192] * 8, [1] * 8),
    "decode 1 x 16K": ([16384], [1]),
    "prefill 2K": ([2048], [2048]),
    "prefill 512 at 4K": ([4096], [512]),
    "mixed": ([512] * 16 + [1024], [1] * 16 + [512]),
}


class Case:
    """One layer's attention to one batch."""

    def __init__(self, backend: AttentionBackend, shape: str, batch: str, dtype: torch.dtype, kv: str) -> None:
        heads, kv_heads, size = SHAPES[shape]
        seq_lens, query_lens = BATCHES[batch]
        self.backend = backend
        self.spec = LayerSpec(heads, kv_heads, size, size, size**-0.5, kv_cache_dtype=KV_DTYPES[kv])
        table = scattered_blocks(seq_lens, BLOCK_SIZE)
        num_blocks = sum(-(-length // BLOCK_SIZE) for length in seq_lens)
        self.cache = backend.new_cache(num_blocks, BLOCK_SIZE, self.spec, dtype, torch.device("cpu"))
        key, value = torch.randn(2, sum(seq_lens), kv_heads, size).to(dtype).unbind()
        backend.write(key, value, self.cache, backend.prepare(metadata_of(seq_lens, seq_lens, table, BLOCK_SIZE)))
        self.batch = backend.prepare(metadata_of(seq_lens, query_lens, table, BLOCK_SIZE))
        tokens = sum(query_lens)
        self.query = torch.randn(heads, tokens, size).to(dtype).transpose(0, 1)
        self.key = torch.randn(kv_heads, tokens, size).to(dtype).transpose(0, 1)
        self.flops = flops_of(self.spec, seq_lens, query_lens)
        self.bytes = sum(seq_lens) * self.spec.bytes_per_token(dtype)

    def attend(self) -> None:
        self.backend.attend(self.query, self.cache, self.batch, self.spec, None)

    def write(self) -> None:
        self.backend.write(self.key, self.key, self.cache, self.batch)


def best(function: Callable[[], Any], seconds: float = 0.15) -> float:
    """Shortest of the calls that fit in `seconds`."""
    # With one thread, the thread's clock stops while other processes have the core.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    function()
    result, end = float("inf"), clock() + seconds
    while (start := clock()) < end:
        function()
        result = min(result, clock() - start)
    return result


def machine_rates(dtype: torch.dtype) -> dict[str, Callable[[], float]]:
    """Functions that measure bytes/s of reading and FLOP/s of multiplying."""
    memory = allocate(2**26, dtype=torch.float32).fill_(1.0)  # on the same kind of pages as the pool
    left, right = torch.randn(2, 1536, 1536).to(dtype).unbind()
    return {
        "read": lambda: memory.numel() * 4 / best(memory.sum),
        "gemm": lambda: 2 * 1536**3 / best(lambda: left @ right),
    }


def measure(
    shape: str, batch: str, dtype: torch.dtype, kvs: list[str], rounds: int, reference: bool
) -> list[dict[str, Any]]:
    """One row for each kind of KV cache; `speedup` is relative to the first."""
    cases = {kv: Case(CpuAttention(), shape, batch, dtype, kv) for kv in kvs}
    times: dict[str, Callable[[], float]] = {}
    for kv, case in cases.items():
        times[f"attend {kv}"] = functools.partial(best, case.attend)
        times[f"write {kv}"] = functools.partial(best, case.write)
    if reference:
        times["reference"] = functools.partial(best, Case(ReferenceAttention(), shape, batch, dtype, kvs[0]).attend)
    rates = machine_rates(dtype)
    seen: dict[str, float] = dict.fromkeys(rates, 0.0) | dict.fromkeys(times, float("inf"))
    for _ in range(rounds):
        for name, rate in rates.items():
            seen[name] = max(seen[name], rate())
        for name, duration in times.items():
            seen[name] = min(seen[name], duration())
    rows = []
    for kv, case in cases.items():
        seconds = seen[f"attend {kv}"]
        rows.append(
            {
                "shape": shape,
                "batch": batch,
                "dtype": str(dtype).removeprefix("torch."),
                "kv_cache_dtype": kv,
                "attend_us": seconds * 1e6,
                "write_us": seen[f"write {kv}"] * 1e6,
                "gigabytes_per_second": case.bytes / seconds / 1e9,
                "read_share": case.bytes / seconds / seen["read"],
                "gigaflops": case.flops / seconds / 1e9,
                "gemm_share": case.flops / seconds / seen["gemm"],
                "speedup": seen[f"attend {kvs[0]}"] / seconds,
                "machine_read_gigabytes_per_second": seen["read"] / 1e9,
                "machine_gemm_gigaflops": seen["gemm"] / 1e9,
            }
        )
    if reference:
        rows[0]["reference_us"] = seen["reference"] * 1e6
    return rows


def show(row: dict[str, Any]) -> None:
    read, gemm = row["machine_read_gigabytes_per_second"], row["machine_gemm_gigaflops"]
    reference = f"  reference {row['reference_us'] / row['attend_us']:5.1f} x slower" if "reference_us" in row else ""
    print(
        f"{row['dtype']:<9}{row['kv_cache_dtype']:<5}{row['shape']:<12}{row['batch']:<18}{row['attend_us']:9.0f} us "
        f"(x {row['speedup']:.2f}) "
        f"{row['gigabytes_per_second']:6.1f} GB/s ({row['read_share']:4.0%} of read {read:.0f}) "
        f"{row['gigaflops']:6.0f} GFLOP/s ({row['gemm_share']:4.0%} of matmul {gemm:.0f})  "
        f"write {row['write_us']:6.0f} us{reference}",
        flush=True,
    )


def main() -> None:
    options = common.options(
        __doc__,
        threads=torch.get_num_threads(),
        dtype=dict(nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32", "float16"]),
        kv=common.choice(["auto", "int8"]),
        shape=common.choice(SHAPES),
        batch=common.choice(BATCHES),
        isa=dict(default="", help="instruction set; the default is the machine's best"),
        rounds=5,
        reference=False,
    )
    torch.set_num_threads(options.threads)
    if not use_instruction_set(options.isa):
        sys.exit(f"--isa {options.isa} is not available on this machine or in this build")
    print(f"{common.machine()}; {options.threads} threads; {instruction_set()}")
    rows = []
    for dtype, shape, batch in itertools.product(options.dtype, options.shape, options.batch):
        measured = measure(shape, batch, getattr(torch, dtype), options.kv, options.rounds, options.reference)
        rows += measured
        for row in measured:
            show(row)
    common.record(options, [], instruction_set=instruction_set(), block_size=BLOCK_SIZE, rows=rows)


if __name__ == "__main__":
    main()
