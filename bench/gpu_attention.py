#!/usr/bin/env python3
"""The Triton attention kernel on a GPU: is it right, and how near is it to what the card can do?

    python bench/gpu_attention.py [--quick] [--tune] [--output record.json]      on a machine with a GPU
    python bench/gpu_attention.py --compile [--output record.json]               anywhere

Needs torch, triton and numpy, nothing else.  `run` is also called by bench/gpu.py.

Right: against a float32 reference on the CPU, fresh random numbers, a pool and an output full of NaN.
Decode reads each key and value once: bytes over the time of a large device-to-device copy (bytes read
plus written).  Prefill multiplies: the causal half of the products over the rate of a bf16 matrix
product, and beside torch's flash attention, which is given contiguous keys and values.  Times are
medians of graph replays; the pool is many times the size of the L2 cache.

--compile needs no GPU: it compiles what is shipped and prints registers, spills and shared memory.
--tune tries other tile shapes and prints the best for each kind of batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "backend"), str(ROOT / "tests" / "support")]

import triton
from attention_cases import CASES, FP8, case_of, stored
from paged_case import PagedCase, relative_error

from inflight.attention import triton_backend, triton_configs
from inflight.attention.base import AttentionMetadata, LayerSpec
from inflight.attention.reference import ReferenceAttention
from inflight.attention.triton_backend import TritonAttention
from inflight.attention.triton_configs import Tile

BLOCK_SIZE = 16
LLAMA = LayerSpec(32, 8, 128, 128, 128**-0.5)  # Llama 3 8B


@dataclass(frozen=True)
class Shape:
    """A batch to time: layer, context and new tokens of each request.

    Attributes:
        bound: "bytes" is compared with copying, "flops" with a matrix product, "sum" with the parts' times.
        target: least ratio that is aimed at; most for "sum".
    """

    name: str
    spec: LayerSpec
    lens: tuple[int, ...]
    counts: tuple[int, ...]
    bound: str
    target: float | None = None
    block_size: int = BLOCK_SIZE


def cases(quick: bool = False) -> list[Shape]:
    """The timed batches; the targets are those of an H200."""
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
        Shape("prefill 8K", LLAMA, (8192,), (8192,), "flops"),
        Shape("prefill 4 x 2K", LLAMA, (2048,) * 4, (2048,) * 4, "flops"),
        Shape("chunk 2K at 16K", LLAMA, (16384,), (2048,), "flops"),
        Shape("chunk 64 at 16K", LLAMA, (16384,), (64,), "bytes"),
        Shape("prefill 8K d64", small, (8192,), (8192,), "flops"),
        Shape("prefill 4K d256", large, (4096,), (4096,), "flops"),
        Shape("mix: 64 x 2K and 2K chunk", LLAMA, *chunk, "sum", 1.2),
    ]
    wanted = ("decode 64 x 2K", "decode 8 x 16K", "prefill 8K", "mix: 64 x 2K and 2K chunk")
    return [shape for shape in shapes if not quick or shape.name in wanted]


def run(device: torch.device, quick: bool = False) -> list[dict[str, Any]]:
    """Rows {name, shape, error, achieved, limit, ratio, ...}: the grid of correctness, then the timed batches.

    `error` is relative (Frobenius norms) to float32; `achieved` and `limit` are bytes/s or FLOP/s as `unit`
    says, `ratio` is their quotient, except for the mixed batch: milliseconds, over the sum of its parts.
    """
    raise NotImplementedError
