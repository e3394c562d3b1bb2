"""Batches for the GPU attention kernels, in the interpreter and on a device."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from paged_case import PagedCase

from inflight.attention.base import KVCache, LayerSpec
from inflight.kernels.gpu import gpu_attention
from inflight.kernels.gpu.gpu_attention import GpuAttention
from inflight.kernels.gpu.gpu_attention_configs import Tile
from inflight.kernels.gpu.launch import interpreted

FP8 = torch.float8_e4m3fn


def spec(heads: int, kv_heads: int, size: int, **features: Any) -> LayerSpec:
    return LayerSpec(heads, kv_heads, size, size, size**-0.5, **features)


# name -> layer, lengths, new tokens, block size
CASES: dict[str, tuple[LayerSpec, list[int], list[int], int]] = {
    "decode": (spec(8, 2, 64), [1, 16, 33, 150], [1, 1, 1, 1], 16),
    "prompts": (spec(4, 2, 64), [3, 70], [3, 70], 16),
    "chunks in the middle": (spec(4, 2, 64), [90, 140], [50, 13], 16),
    "mix": (spec(4, 1, 128), [60, 1, 130, 17], [1, 1, 70, 6], 16),
    "a few tokens each": (spec(8, 2, 64), [30, 9, 70], [4, 2, 3], 16),
    "head size 80, odd group": (spec(6, 2, 80), [40, 66], [1, 40], 16),
    "head size 96": (spec(3, 3, 96), [40, 66], [1, 40], 16),
    "head size 256": (spec(2, 1, 256), [40, 66], [1, 20], 16),
    "head size 8": (spec(4, 2, 8), [40, 66], [1, 20], 16),
    "values of another size": (LayerSpec(4, 2, 96, 64, 0.1), [40, 66], [1, 20], 16),
    "group of 71": (spec(64, 1, 32), [20, 30], [1, 7], 16),
    "window": (spec(4, 2, 64, sliding_window=40), [100, 150, 20], [1, 60, 20], 16),
    "window of one": (spec(4, 2, 64, sliding_window=1), [80, 90], [1, 20], 16),
    "softcap": (spec(4, 2, 64, softcap=3.0), [100, 90], [1, 20], 16),
    "sinks": (spec(8, 2, 64, has_sinks=True), [100, 90], [1, 20], 16),
    "all features": (spec(4, 2, 64, sliding_window=70, softcap=5.0, has_sinks=True), [100, 120], [1, 40], 16),
    "blocks of 48": (spec(4, 2, 64), [100, 130], [1, 60], 48),
    "blocks as tiles": (spec(4, 2, 64), [100, 130], [1, 60], 128),
    "blocks of two tiles": (spec(2, 1, 64), [300, 260], [1, 20], 256),
}


def case_of(name: str, dtype: torch.dtype, **changes: Any) -> PagedCase:
    layer, seq_lens, query_lens, block_size = CASES[name]
    return PagedCase(layer, seq_lens, query_lens, block_size, dtype, **changes)


def stored(case: PagedCase, cache: KVCache) -> PagedCase:
    """The case with the keys and values that the GPU kernel's fp8 pool contains, in the model's dtype."""
    exact = replace(case, spec=replace(case.spec, kv_cache_dtype=None))
    for kept, pool, scale in ((exact.keys, cache.key, cache.key_scale), (exact.values, cache.value, cache.value_scale)):
        assert scale is not None
        actual = pool.float() * scale[:, None, None]
        for row, length in enumerate(case.seq_lens):
            blocks = case.block_table()[row, : -(-length // case.block_size)].to(pool.device)
            kept[row] = actual[blocks].transpose(1, 2).flatten(0, 1)[:length].to(case.dtype)
    exact.query, exact.sinks = case.query, case.sinks
    return exact


def compile_ahead(jobs: list[tuple[LayerSpec, torch.dtype, int, Tile | None]]) -> None:
    """Fill the compiler's cache on disk from several processes: a layer takes one core several seconds.

    Jobs are (layer, dtype, block size, tile); tile None is the shipped one.  The interpreter compiles nothing.
    """
    if interpreted():
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(max(1, min(8, (os.cpu_count() or 1) - 1, len(jobs)))) as pool:
        pool.map(_compile, jobs, chunksize=1)


def _compile(job: tuple[LayerSpec, torch.dtype, int, Tile | None]) -> None:
    from triton.runtime.errors import OutOfResources

    spec, dtype, block_size, tile = job
    with forced_tile(tile), suppress(OutOfResources):
        GpuAttention().new_cache(1, block_size, spec, dtype, torch.device("cuda"))


@contextmanager
def forced_tile(tile: Tile | None) -> Iterator[None]:
    chosen = gpu_attention.tile_for
    if tile is not None:
        gpu_attention.tile_for = lambda *_: tile
    try:
        yield
    finally:
        gpu_attention.tile_for = chosen
