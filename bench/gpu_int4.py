"""Layers with weights in four bits: correctness and speed.  Used by bench/gpu_ops.py.

Up to 64 rows a product is limited by the bytes of its codes, so it is compared with the rate at which the card reads;
larger ones with the rate of torch's products in 16 bits, which they contain.  Both are compared with torch's product of
the plain weight in bfloat16, and where the card has them with products in fp8.  Times are medians of graph replays over
enough copies of the weights that none remains in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_rates import FLUSH_BYTES, gemm_rate, read_rate, seconds
from torch import Tensor

from inflight.kernels.gpu.gpu_int4 import MAX_ROWS, GpuInt4, parts_of
from inflight.kernels.registry import select_ops
from inflight.loading.quantization.fp8_product import product, that_runs
from inflight.ops.int4 import Int4Weight, span_of

ERROR_LIMIT = 0.01  # relative, of 16 bits
# name -> inputs that share a scale, and whether it comes with a min
KINDS = {"int4 of a checkpoint, groups of 128": (128, False), "int4, groups of 32": (32, True)}


def _weight(outputs: int, inputs: int, group: int, mins: bool, device: torch.device) -> Int4Weight:
    """Random codes; their numbers are about as large as those of a model."""
    span, groups = span_of(inputs, group), inputs // group
    assert span is not None
    codes = torch.randint(0, 256, (inputs // (2 * span), outputs, span), dtype=torch.uint8, device=device)
    size = 4 * inputs**0.5
    if not mins:
        zeros = torch.randint(6, 10, (groups, outputs), dtype=torch.uint8, device=device)
        return Int4Weight(codes, (torch.rand(groups, outputs, device=device) / size).half(), zeros)
    scales = torch.randint(128, 256, (groups, outputs), dtype=torch.uint8, device=device)
    factors = torch.full((2, outputs), 1 / (256 * size), device=device)
    factors[1] *= 8
    return Int4Weight(codes, scales, scales.flip(0).contiguous(), factors)


def _cases(device: torch.device, sizes: list[tuple[int, int]]) -> Iterator[tuple[str, int, int, int, bool]]:
    for name, (group, mins) in KINDS.items():
        for outputs, inputs in [(64, 256)] if device.type == "cpu" else sizes:
            yield name, outputs, inputs, group, mins


def int4_check_rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """Relative errors, compared with the definition in float32."""
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16  # the interpreter has no bfloat16
    for name, outputs, inputs, group, mins in _cases(device, [(4096, 14336)]):
        ops, weight = GpuInt4(), _weight(outputs, inputs, group, mins, device)
        ops.prepare(weight, dtype)
        for rows in (2, MAX_ROWS + 1) if device.type == "cpu" else (1, 17, 33, 64, 65):
            x = torch.randn(rows, inputs, device=device).to(dtype)
            exact = F.linear(x.float(), weight.dequantised(torch.float32))
            error = ((ops.linear(x, weight, None).float() - exact).norm() / exact.norm()).item()
            yield dict(name=f"{name}, is right", shape=f"{rows} x {inputs} -> {outputs}", achieved=error,
                       limit=ERROR_LIMIT, ratio=error / ERROR_LIMIT, unit="relative error",
                       passed=error <= ERROR_LIMIT)  # fmt: skip


def int4_rows(device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    """Rows {name, shape, microseconds, achieved, limit, ratio, unit, over_torch, over_fp8} of layers of Llama 3 8B.

    `over_torch` and `over_fp8` are speedups over bfloat16 and fp8.  The scale of fp8's inputs is computed, too.
    """
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    batches = (1, 16, 64, 2048) if quick else (1, 4, 8, 16, 32, 64, 128, 512, 2048)
    read, flops = read_rate(device), gemm_rate(device)
    for name, outputs, inputs, group, mins in _cases(device, [(6144, 4096), (28672, 4096), (4096, 14336)]):
        moved = sum(x.nbytes for x in _parts(_weight(outputs, inputs, group, mins, device)))
        copies = 1 if device.type == "cpu" else min(64, max(2, FLUSH_BYTES // moved))
        ops, weights = GpuInt4(), [_weight(outputs, inputs, group, mins, device) for _ in range(copies)]
        ops.prepare(weights[0], dtype)
        plain = [torch.randn(outputs, inputs, device=device).to(dtype) for _ in range(min(copies, 8))]
        for rows in (2,) if device.type == "cpu" else batches:
            x = torch.randn(rows, inputs, device=device).to(dtype)
            ours = seconds([partial(ops.linear, x, weight, None) for weight in weights], device)
            by_torch = seconds([partial(F.linear, x, weight) for weight in plain], device)
            row = dict(name=name, shape=f"{rows} x {inputs} -> {outputs}, {parts_of(weights[0]).count} parts",
                       microseconds=ours * 1e6, over_torch=by_torch / ours)  # fmt: skip
            if rows <= MAX_ROWS:
                row |= dict(achieved=moved / ours, limit=read, ratio=moved / ours / read, unit="bytes/s")
            else:
                rate = 2 * rows * inputs * outputs / ours
                row |= dict(achieved=rate, limit=flops, ratio=rate / flops, unit="FLOP/s")
            if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
                row["over_fp8"] = seconds([_in_fp8(x, weight) for weight in plain], device) / ours
            yield row


def _parts(weight: Int4Weight) -> list[Tensor]:
    return [x for x in (weight.codes, weight.scales, weight.offsets, weight.factors) if x is not None]


def _in_fp8(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """The layer as `quantization: "fp8"` computes it, with a scale per output."""
    ops = select_ops(x.device)
    stored = ops.quantize_rows(weight)
    multiply = that_runs(product, stored.values, stored.scales, None, x.dtype)
    return lambda: multiply(ops.quantize_rows(x), stored.values, stored.scales, None, x.dtype)
