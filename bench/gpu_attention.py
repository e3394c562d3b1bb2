#!/usr/bin/env python3
"""The GPU attention kernel: correctness, and speed compared with the card's limits.

    python bench/gpu_attention.py [--quick | --tune] [--output record.json]     on a machine with a GPU
    python bench/gpu_attention.py --compile [--output record.json]               anywhere
    TRITON_INTERPRET=1 python bench/gpu_attention.py --quick                     anywhere, to see that it works

Requires torch, triton and numpy only.  bench/gpu.py also calls `run`.

Correctness: some requests of each batch are compared with float32, on new random numbers, with an output full of NaN;
tests/gpu checks all features.
Decodes read each key and value once: their bytes per second are compared with a large device-to-device copy (bytes
read plus written).  Prefills multiply: the causal half of the products is compared with the rate of a bf16 matrix
product, with torch's flash attention on contiguous keys and values, and with FlashAttention-3 where it is installed.
Times are medians of graph replays; a batch that reads less than several L2 caches is timed on several pools in turn,
so that none of it is left in the cache.

--compile needs no GPU: it compiles the shipped shapes and prints registers, stack (spills) and shared memory.
--tune compares the shipped tiles with a shortlist of twelve, and prints the best ones.
"""

# ruff: noqa: E402  (sys.path comes first: the repository need not be installed)

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("bench", "backend", "tests/support")]

import triton
from attention_batch import flops_of, metadata_of, scattered_blocks
from attention_cases import FP8, compile_ahead, forced_tile
from gpu_rates import FLUSH_BYTES, copy_rate, gemm_rate, seconds
from gpu_rows import line
from gpu_tiles import SHORTLIST
from paged_case import relative_error

from inflight.attention.base import KVCache, LayerSpec
from inflight.kernels.gpu.gpu_attention import GpuAttention
from inflight.kernels.gpu.gpu_attention_configs import Tile
from inflight.kernels.gpu.gpu_flash3 import Flash3Attention
from inflight.kernels.gpu.launch import interpreted

BLOCK_SIZE = 16
LLAMA = LayerSpec(32, 8, 128, 128, 128**-0.5)  # Llama 3 8B


@dataclass(frozen=True)
class Shape:
    """A batch to time: layer, context and new tokens of each request.

    Attributes:
        bound: "bytes" is compared with copying, "flops" with a matrix product, "sum" with the parts' times.
        target: minimum ratio; for "sum" the maximum, for "flops" the minimum speed relative to torch's flash attention.
    """

    name: str
    spec: LayerSpec
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    bound: str
    target: float | None = None
    block_size: int = BLOCK_SIZE


def cases(quick: bool = False) -> list[Shape]:
    """The timed batches, with targets for an H200."""
    fp8 = replace(LLAMA, kv_cache_dtype=FP8)
    small = LayerSpec(32, 8, 64, 64, 64**-0.5)
    large = LayerSpec(16, 8, 256, 256, 256**-0.5)
    chunk = ((2048,) * 64 + (2048,), (1,) * 64 + (2048,))
    shapes = [
        Shape("decode 64 x 2K", LLAMA, (2048,) * 64, (1,) * 64, "bytes", 0.85),
        Shape("decode 8 x 16K", LLAMA, (16384,) * 8, (1,) * 8, "bytes", 0.85),
        Shape("decode 1 x 32K", LLAMA, (32768,), (1,), "bytes"),
        Shape("decode 256 x 1K", LLAMA, (1024,) * 256, (1,) * 256, "bytes"),
        Shape("decode 64, 128..8K", LLAMA, tuple(range(128, 8193, 128)), (1,) * 64, "bytes"),
        Shape("decode 64 x 2K, blocks of 128", LLAMA, (2048,) * 64, (1,) * 64, "bytes", block_size=128),
        Shape("decode 64 x 4K fp8", fp8, (4096,) * 64, (1,) * 64, "bytes"),
        Shape("decode 64 x 2K d64", small, (2048,) * 64, (1,) * 64, "bytes"),
        Shape("decode 64 x 2K d256", large, (2048,) * 64, (1,) * 64, "bytes"),
        Shape("verify 32 x 2K, 4 tokens", LLAMA, (2048,) * 32, (4,) * 32, "bytes"),
        Shape("prefill 8K", LLAMA, (8192,), (8192,), "flops", 1.0),
        Shape("prefill 4 x 2K", LLAMA, (2048,) * 4, (2048,) * 4, "flops"),
        Shape("chunk 2K at 16K", LLAMA, (16384,), (2048,), "flops"),
        Shape("chunk 64 at 16K", LLAMA, (16384,), (64,), "bytes"),
        Shape("prefill 8K d64", small, (8192,), (8192,), "flops"),
        Shape("prefill 4K d256", large, (4096,), (4096,), "flops"),
        Shape("mix: 64 x 2K and 2K chunk", LLAMA, *chunk, "sum", 1.2),
    ]
    wanted = ("decode 64 x 2K", "decode 8 x 16K", "prefill 8K", "mix: 64 x 2K and 2K chunk")
    return [shape for shape in shapes if (not quick or shape.name in wanted) and (shape.spec is not fp8 or has_fp8())]


def tiny(shape: Shape) -> Shape:
    """For the interpreter, to show that this script works."""
    spec = LayerSpec(4, 2, 32, 32, 32**-0.5, kv_cache_dtype=shape.spec.kv_cache_dtype)
    seq_lens = tuple(min(length, 80) for length in shape.seq_lens[:2] + shape.seq_lens[-1:])
    query_lens = tuple(min(count, 40) for count in shape.query_lens[:2] + shape.query_lens[-1:])
    return replace(shape, spec=spec, seq_lens=seq_lens, query_lens=query_lens)


def num_pools(shape: Shape, size: int) -> int:
    """Pools to read in turn, for a batch whose keys and values take `size` bytes."""
    return -(-FLUSH_BYTES // size) if shape.bound == "bytes" else 1


class Batch:
    """One layer's attention to a batch: random keys and values in scattered blocks.

    Attributes:
        caches: pools of equal size: one if it exceeds the L2 cache or multiplication is the limit, else several.
    """

    def __init__(self, shape: Shape, device: torch.device, backend: GpuAttention | None = None) -> None:
        spec, size, dtype = shape.spec, shape.block_size, torch.bfloat16
        self.shape, self.backend = shape, backend or GpuAttention()
        blocks = [-(-length // size) for length in shape.seq_lens]
        self.bytes = sum(shape.seq_lens) * spec.bytes_per_token(dtype)
        count = num_pools(shape, self.bytes) if device.type == "cuda" else 1
        self.caches = [self.backend.new_cache(sum(blocks), size, spec, dtype, device) for _ in range(count)]
        for cache in self.caches:
            for pool in (cache.key, cache.value):
                for part in pool.split(4096):
                    part.copy_(torch.randn(part.shape, dtype=dtype, device=device).to(pool.dtype))
        table = scattered_blocks(shape.seq_lens, size)
        metadata = metadata_of(shape.seq_lens, shape.query_lens, table, size, device)
        self.metadata, self.batch = metadata, self.backend.prepare(metadata)
        rows = sum(shape.query_lens)
        self.query = torch.randn(rows, spec.num_heads, spec.key_head_size, dtype=dtype, device=device)
        self.flops = flops_of(spec, shape.seq_lens, shape.query_lens)

    def attend(self, cache: KVCache | None = None) -> Tensor:
        return self.backend.attend(self.query, cache or self.caches[0], self.batch, self.shape.spec, None)

    def seconds(self) -> float:
        """Median time of `attend`, over the pools in turn."""
        return spent_by([partial(self.attend, cache) for cache in self.caches], self.query.device)

    def error(self) -> float:
        """Relative error of some requests' rows of one KV head, compared with float32."""
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialised tensors with NaN
        out = self.attend()
        torch.use_deterministic_algorithms(False)
        spec, query_start_loc = self.shape.spec, self.metadata.query_start_loc_cpu
        group, kv_head = spec.num_heads // spec.num_kv_heads, spec.num_kv_heads - 1
        heads = slice(kv_head * group, (kv_head + 1) * group)
        errors = []
        for row in {0, len(self.shape.seq_lens) // 2, len(self.shape.seq_lens) - 1}:
            length, count = self.shape.seq_lens[row], self.shape.query_lens[row]
            blocks = self.metadata.block_table[row, : -(-length // self.shape.block_size)]
            key, value = (
                pool.select(1, kv_head).float()[blocks].flatten(0, 1)[:length]
                for pool in (self.caches[0].key, self.caches[0].value)
            )
            query = self.query[query_start_loc[row] : query_start_loc[row + 1], heads].float()
            scores = torch.einsum("qhd,kd->hqk", query, key) * spec.scaling
            position = torch.arange(length, device=key.device)
            scores.masked_fill_(position[None, :] > position[length - count :, None], float("-inf"))
            expected = torch.einsum("hqk,kd->qhd", torch.softmax(scores, -1), value)
            errors.append(relative_error(out[query_start_loc[row] : query_start_loc[row + 1], heads], expected))
        return max(errors)


def spent_by(functions: list[Callable[[], Any]], device: torch.device) -> float:
    """Median seconds of one call; each function is called as often as the others, all together at least eight times."""
    return seconds(functions * (-(-8 // len(functions)) if device.type == "cuda" else 1), device)


def flash_seconds(shape: Shape, device: torch.device) -> float | None:
    """Time of torch's flash attention on the same prompts, contiguous; None if it does not apply."""
    spec, seq_lens = shape.spec, shape.seq_lens
    if device.type != "cuda" or seq_lens != shape.query_lens or len(set(seq_lens)) > 1:
        return None
    query, key, value = (
        torch.randn(len(seq_lens), heads, seq_lens[0], spec.key_head_size, dtype=torch.bfloat16, device=device)
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )

    def flash() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        try:
            flash()
        except RuntimeError:  # this torch's flash attention does not support GQA
            group = spec.num_heads // spec.num_kv_heads
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        return spent_by([flash], device)


def flash3_seconds(shape: Shape, device: torch.device) -> float | None:
    """Time of FlashAttention-3 on the same pool; None without it."""
    backend = Flash3Attention()
    if device.type != "cuda" or backend.unsupported(shape.spec, torch.bfloat16, shape.block_size) is not None:
        return None
    return Batch(shape, device, backend).seconds()


def has_fp8() -> bool:
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)


def check_row(shape: str, error: float) -> dict[str, Any]:
    allowed = torch.finfo(torch.bfloat16).eps
    return dict(name="attention is right", shape=shape, error=error, achieved=error, limit=allowed,
                ratio=error / allowed, unit="error", passed=bool(error <= allowed))  # fmt: skip


def timed_row(shape: Shape, device: torch.device, rates: dict[str, float]) -> dict[str, Any]:
    batch = Batch(shape, device)
    row: dict[str, Any] = dict(name="attention", shape=shape.name, error=batch.error())
    spent = batch.seconds()
    row["microseconds"] = spent * 1e6
    if shape.bound == "sum":
        first = replace(shape, seq_lens=shape.seq_lens[:-1], query_lens=shape.query_lens[:-1])
        last = replace(shape, seq_lens=shape.seq_lens[-1:], query_lens=shape.query_lens[-1:])
        parts = [Batch(part, device).seconds() for part in (first, last)]
        row |= dict(achieved=spent * 1e3, limit=sum(parts) * 1e3, ratio=spent / sum(parts), unit="ms")
    else:
        work = batch.bytes if shape.bound == "bytes" else batch.flops
        row |= dict(achieved=work / spent, limit=rates[shape.bound], ratio=work / spent / rates[shape.bound])
        row["unit"] = "bytes/s" if shape.bound == "bytes" else "FLOP/s"
    if shape.bound == "flops" and (flash := flash_seconds(shape, device)):
        row |= dict(flash_microseconds=flash * 1e6, over_flash=flash / spent)
    if shape.bound == "flops" and (flash3 := flash3_seconds(shape, device)):
        row |= dict(flash3_microseconds=flash3 * 1e6, over_flash3=flash3 / spent)
    reached = row.get("over_flash") if shape.bound == "flops" else row["ratio"]
    if shape.target is not None and reached is not None:
        row["target"] = shape.target
        row["passed"] = bool(reached <= shape.target if shape.bound == "sum" else reached >= shape.target)
    return row


def run(device: torch.device, quick: bool = False, rates: dict[str, float] | None = None) -> Iterator[dict[str, Any]]:
    """Rows {name, shape, error, achieved, limit, ratio, unit, ...} as they are measured: check and time of a batch.

    `error` is relative to float32 (Frobenius norm).  `achieved` and `limit` are in `unit` (bytes/s or FLOP/s), and
    `ratio` is their quotient; in checks they are errors, and for the mixed batch milliseconds: its time, and the
    sum of its parts' times.  Rows with a target have `passed`.

    Args:
        rates: the card's "copy" and "gemm"; None measures them.
    """
    shapes = cases(quick)
    if device.type == "cuda":
        jobs = {(shape.spec, torch.bfloat16, shape.block_size, None) for shape in shapes}
        compile_ahead(sorted(jobs, key=str))
    else:
        shapes = [tiny(shape) for shape in shapes]
    rates = rates or {"copy": copy_rate(device), "gemm": gemm_rate(device)}
    limits = {"bytes": rates["copy"], "flops": rates["gemm"]}
    for shape in shapes:
        timed = timed_row(shape, device, limits)
        yield check_row(shape.name, timed["error"])
        yield timed
        torch.cuda.empty_cache()


def tune(device: torch.device, tiles_of: dict[str, tuple[Tile, ...]]) -> Iterator[dict[str, Any]]:
    """The timed batches with other tile shapes, as they are measured: the three best of each, and the shipped one."""
    shapes = {shape.name: shape for shape in cases()}
    for name, tiles in tiles_of.items():
        if name not in shapes:
            continue  # fp8, which this card lacks
        shape = shapes[name]
        compile_ahead([(shape.spec, torch.bfloat16, shape.block_size, tile) for tile in tiles])
        times: dict[Tile | None, float] = {}
        for tile in [None, *tiles]:
            with forced_tile(tile), suppress(triton.OutOfResources):
                times[tile] = Batch(shape, device).seconds()
            torch.cuda.empty_cache()
        best = sorted(times, key=times.__getitem__)[:3]
        for tile in [None, *(tile for tile in best if tile)]:
            yield dict(name="tile", shape=name, tile=str(tile or "shipped"), microseconds=times[tile] * 1e6)


def compile_shipped() -> Iterator[dict[str, Any]]:
    """Registers, stack and shared memory of each shipped shape; the cards need not be present."""
    from gpu_target import card, target

    def layer(size: int, **features: Any) -> LayerSpec:
        return LayerSpec(32, 8, size, size, size**-0.5, **features)

    plain = [(layer(size), dtype) for size in (64, 80, 96, 128, 256) for dtype in (torch.bfloat16,)]
    plain += [(layer(size), torch.float32) for size in (64, 128, 256)]
    featured = [(layer(64, sliding_window=128, has_sinks=True), torch.bfloat16)]
    featured += [(layer(256, sliding_window=4096, softcap=50.0), torch.bfloat16)]
    fp8 = [(layer(size, kv_cache_dtype=FP8), torch.bfloat16) for size in (64, 128, 256)]
    for arch in (80, 89, 90, 100, 120):
        with target(arch) as compiled:
            for spec, dtype in plain + featured + (fp8 if arch >= 89 else []):
                before = len(compiled)
                GpuAttention(card(arch)).new_cache(1, BLOCK_SIZE, spec, dtype, torch.device("cpu"))
                for kernel in compiled[before:]:
                    about = dict(arch=arch, dtype=str(dtype).removeprefix("torch."), layer=describe(spec))
                    yield about | kernel.report(arch)


def describe(spec: LayerSpec) -> str:
    features = [f"{spec.num_heads}/{spec.num_kv_heads} x {spec.key_head_size}"]
    features += [f"window {spec.sliding_window}"] if spec.sliding_window else []
    features += ["softcap"] if spec.softcap else []
    features += ["sinks"] if spec.has_sinks else []
    features += ["fp8 pool"] if spec.kv_cache_dtype else []
    return ", ".join(features)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the batches with targets, and some of the checks")
    parser.add_argument("--tune", action="store_true", help="try a shortlist of other tile shapes")
    parser.add_argument("--compile", action="store_true", help="compile the shipped shapes, without a GPU")
    parser.add_argument("--output", type=Path, help="write the record to this file, as JSON")
    options = parser.parse_args()
    record: dict[str, Any] = dict(
        command=" ".join(["python", "bench/gpu_attention.py", *sys.argv[1:]]),
        date=str(date.today()),
        torch=torch.__version__,
        triton=triton.__version__,
    )
    if options.compile:
        rows = compile_shipped()
    else:
        device = torch.device("cpu" if interpreted() else "cuda")
        record["card"] = "none" if interpreted() else torch.cuda.get_device_name()
        rows = tune(device, SHORTLIST) if options.tune else run(device, options.quick)
    is_timed = not (options.compile or options.tune)
    record["rows"] = []
    for row in rows:
        record["rows"].append(row)
        print(line(row) if is_timed else row, flush=True)
        if options.output:  # after each row: a run that is killed keeps what it has measured
            options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
