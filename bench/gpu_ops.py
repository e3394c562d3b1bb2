"""The small operations and sampling on a GPU: correctness, and speed compared with the card's limits.

Used by bench/gpu.py.  Requires torch, triton, numpy and msgspec.

Correctness: small operations are compared with `ReferenceOps` in float32, with rows as slices of wider ones full of NaN
and results initialised with NaN; sampling is compared with the CPU's sampler, token by token.  Speed: bytes read and
written, each once, compared with a large device-to-device copy.  Times are medians of graph replays over enough copies
of the operands that none remains in the L2 cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_experts import block_fp8_rows, expert_rows
from gpu_experts import check_rows as expert_check_rows
from gpu_few_rows import few_row_rows
from gpu_int4 import int4_check_rows, int4_rows
from gpu_rates import FLUSH_BYTES, copy_rate, seconds
from torch import Tensor

from inflight.attention.base import AttentionMetadata, LayerAttention, LayerSpec
from inflight.attention.reference import ReferenceAttention
from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.gpu import gpu_kv_cache, gpu_sampler
from inflight.kernels.gpu.gpu_ops import GpuOps
from inflight.kernels.registry import select_sampling
from inflight.ops.base import Angles, HeadNorms, projection_sizes
from inflight.ops.reference_ops import ReferenceOps
from inflight.sampling import Sampler, SamplingTable

KERNELS, REFERENCE = OPS = GpuOps(), ReferenceOps()
BLOCK_SIZE = 16
QUANTIZED_LIMIT = 1e-3  # share of values that round to the neighbour
VOCABULARY = 151936  # Qwen3
SAMPLING_TARGET = 300e-6  # seconds for 256 rows on an H200

KINDS = {
    "plain": [SamplingParams()],
    "top_p 0.9": [SamplingParams(top_p=0.9)],
    "min_p 0.05": [SamplingParams(min_p=0.05)],
    "top_k 50": [SamplingParams(top_k=50)],
    "top_k 20, top_p 0.95": [SamplingParams(temperature=0.6, top_k=20, top_p=0.95)],
    "mixed": [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_p=0.8),
        SamplingParams(top_k=1000, top_p=0.99),
        SamplingParams(temperature=1.5, min_p=0.02),
        SamplingParams(top_k=5),
    ],
    # More than the kernel's lanes: the k-th logit is searched in the row itself, not in a list.
    "top_k 3000": [SamplingParams(top_k=3000)],
}
CHECKED = ("mixed", "top_k 3000")


def sliced(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random rows as a slice of wider ones whose other elements are NaN."""
    wide = torch.full((*shape[:-1], shape[-1] + 32), float("nan"), dtype=dtype, device=device)
    rows = wide[..., 16:-16]
    rows.copy_(torch.randn(shape, dtype=torch.float32, device=device))
    return rows


def _rms_norm(ops: Any, x: Tensor, weight: Tensor) -> list[Tensor]:
    return [ops.rms_norm(x, weight, 1e-6)]


def _add_rms_norm(ops: Any, x: Tensor, residual: Tensor, weight: Tensor) -> list[Tensor]:
    residual = residual.clone()
    return [ops.add_rms_norm(x, residual, weight, 1e-6), residual]


def _rotary(ops: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    query, key = query.clone(), key.clone()
    ops.rotary(query, key, cos, sin)
    return [query, key]


def _silu_and_mul(ops: Any, gate_up: Tensor) -> list[Tensor]:
    return [ops.silu_and_mul(gate_up)]


def _layer(ops: Any, spec: LayerSpec, num_tokens: int, like: Tensor) -> LayerAttention:
    """With a cache of the kind that `ops` writes to in one launch."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    if ops is KERNELS:
        cache: Any = gpu_kv_cache.new_cache(num_blocks, BLOCK_SIZE, spec, like.dtype, like.device)
    else:
        cache = ReferenceAttention().new_cache(num_blocks, BLOCK_SIZE, spec, like.dtype, like.device)
    return LayerAttention(spec, ReferenceAttention(), cache)


def _batch(num_tokens: int, device: torch.device) -> AttentionMetadata:
    """Each token in a slot of its own, in reverse order."""
    void = torch.empty(0, device=device)
    slots = torch.arange(num_tokens - 1, -1, -1, device=device)
    return AttentionMetadata(void, void, void, slots, [], [], 0, 0, BLOCK_SIZE)


def _rotate_and_write(
    spec: LayerSpec, ops: Any, qkv: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor
) -> list[Tensor]:
    """Query, and what the slots hold afterwards; with norms if there are weights."""
    layer, batch = _layer(ops, spec, len(qkv), qkv), _batch(len(qkv), qkv.device)
    norms = HeadNorms(weights[0], weights[1], 1e-6) if weights else None
    angles = Angles(cos, sin, 2 * cos.shape[1], torch.arange(len(qkv), device=qkv.device))
    query = ops.rotate_and_write(qkv.clone(), layer, batch, norms, angles)
    pools = [layer.cache.key, layer.cache.value]
    if ops is KERNELS:
        pools = [pool.transpose(1, 2) for pool in pools]
    return [query, *(pool.flatten(0, 1)[batch.slot_mapping] for pool in pools)]


def check_cases(quick: bool, tiny: bool) -> list[tuple[str, str, Callable[..., list[Tensor]], list[tuple]]]:
    """Correctness checks: (kernel, shape in words, function, shapes of its operands)."""
    tokens = (3,) if tiny else (1, 33) if quick else (1, 7, 64, 2049)
    widths = (96,) if tiny else (64, 96, 1024, 4096, 5120, 16384)
    cases: list[tuple[str, str, Callable[..., list[Tensor]], list[tuple]]] = []
    for t in tokens:
        for width in widths:
            cases.append(("rms_norm", f"{t} x {width}", _rms_norm, [(t, width), (width,)]))
            cases.append(("add_rms_norm", f"{t} x {width}", _add_rms_norm, [(t, width), (t, width), (width,)]))
            cases.append(("silu_and_mul", f"{t} x {width}", _silu_and_mul, [(t, 2 * width)]))
        for heads, kv_heads, size, rotated in ((4, 2, 64, 64), (3, 1, 80, 32), (32, 8, 128, 128)):
            shapes = [(t, heads, size), (t, kv_heads, size), (t, rotated), (t, rotated)]
            cases.append(("rotary", f"{t} x {heads}+{kv_heads} x {size}, {rotated} rotated", _rotary, shapes))
            cases.append(("rms_norm", f"{t} x {heads} x {size}", _rms_norm, [(t, heads, size), (size,)]))
            spec = LayerSpec(heads, kv_heads, size, size, 1.0)
            shapes = [(t, sum(projection_sizes(spec))), (t, rotated // 2), (t, rotated // 2)]
            words = f"{t} x {heads}+{kv_heads}+{kv_heads} x {size}, {rotated} rotated"
            cases.append(("rotate_and_write", words, partial(_rotate_and_write, spec), shapes))
            shapes = [*shapes, (size,), (size,)]
            cases.append(("rotate_and_write", f"{words}, norms", partial(_rotate_and_write, spec), shapes))
    return cases


def check_rows(device: torch.device, quick: bool, tiny: bool | None = None) -> list[dict[str, Any]]:
    """One row per kernel and dtype: the largest relative error (Frobenius norm) over its shapes.

    Args:
        tiny: few shapes, for the interpreter; None: on a CPU.
    """
    tiny = device.type == "cpu" if tiny is None else tiny
    worst: dict[tuple[str, str], dict[str, Any]] = {}
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialised tensors with NaN
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for name, shape, function, shapes in check_cases(quick, tiny):
            operands = [sliced(*sizes, dtype=dtype, device=device) for sizes in shapes]
            exact = function(REFERENCE, *(operand.float() for operand in operands))
            pairs = zip(function(KERNELS, *operands), exact)
            error = max(float((got.float() - right).norm() / right.norm()) for got, right in pairs)
            # NaN counts as an error.
            error = error if error == error else float("inf")
            key = name, str(dtype).removeprefix("torch.")
            if key not in worst or error > worst[key]["error"]:
                limit = max(1e-6, torch.finfo(dtype).eps)
                worst[key] = dict(name=f"{name} is right", shape=f"{key[1]}, worst: {shape}", error=error,
                                  achieved=error, limit=limit, ratio=error / limit, unit="error",
                                  passed=bool(error <= limit))  # fmt: skip
    torch.use_deterministic_algorithms(False)
    return list(worst.values())


def _timed_rotate_and_write(spec: LayerSpec, num_tokens: int, device: torch.device) -> Callable[..., Tensor]:
    """All copies of the operands write to one pool, which is not read."""
    like = torch.empty(0, dtype=torch.bfloat16, device=device)
    layers = {ops: _layer(ops, spec, num_tokens, like) for ops in OPS}
    batch, positions = _batch(num_tokens, device), torch.arange(num_tokens, device=device)

    def rotate_and_write(ops: Any, qkv: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> Tensor:
        angles = Angles(cos, sin, 2 * cos.shape[1], positions)
        return ops.rotate_and_write(qkv, layers[ops], batch, HeadNorms(weights[0], weights[1], 1e-6), angles)

    return rotate_and_write


def quantized_pairs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Any, Any]]:
    """(kernel, what it quantizes in one launch, the same in two)."""
    x, weight = sliced(rows, width, dtype=dtype, device=device), sliced(width, dtype=dtype, device=device)
    residual, gate_up = (sliced(rows, size, dtype=dtype, device=device) for size in (width, 2 * width))
    plain = KERNELS.rms_norm(x, weight, 1e-6)
    yield "rms_norm_quantized", KERNELS.rms_norm(x, weight, 1e-6, quantized=True), plain
    plain = KERNELS.add_rms_norm(x, residual.clone(), weight, 1e-6)
    yield "add_rms_norm_quantized", KERNELS.add_rms_norm(x, residual.clone(), weight, 1e-6, quantized=True), plain
    yield "silu_and_mul_quantized", KERNELS.silu_and_mul(gate_up, quantized=True), KERNELS.silu_and_mul(gate_up)
    yield "quantize_rows", KERNELS.quantize_rows(x), x


def has_fp8(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


def quantized_check_rows(device: torch.device, rows: int = 65) -> Iterator[dict[str, Any]]:
    """Share of values that differ from the reference's for the plain result: the sum of a norm can have another order.

    Not in the interpreter, which rounds to e4m3 in its own way.
    """
    width = 4096
    if device.type == "cpu" or not has_fp8(device):
        return
    for name, got, plain in quantized_pairs(rows, width, torch.bfloat16, device):
        expected = REFERENCE.quantize_rows(plain)
        share = float((got.values.view(torch.uint8) != expected.values.view(torch.uint8)).float().mean())
        yield dict(name=f"{name} is right", shape=f"{rows} x {width}", achieved=share, limit=QUANTIZED_LIMIT,
                   ratio=share / QUANTIZED_LIMIT, unit="error", passed=share <= QUANTIZED_LIMIT)  # fmt: skip


def timed_cases(device: torch.device, quick: bool) -> list[tuple[str, str, Callable[..., Any], list[tuple], int]]:
    """(kernel, shape in words, function of (ops, operands), shapes of its operands, elements read and written)."""
    if device.type == "cpu":
        sizes = [(3, 64, 96, 4, 2, 16)]
    elif quick:
        sizes = [(8192, 4096, 14336, 32, 8, 128)]
    else:  # Llama 3 8B in decode, prefill; Qwen3 0.6B in a large decode
        sizes = [(64, 4096, 14336, 32, 8, 128), (8192, 4096, 14336, 32, 8, 128), (512, 1024, 3072, 16, 8, 128)]
    cases: list[tuple[str, str, Callable[..., Any], list[tuple], int]] = []
    for t, hidden, inner, heads, kv_heads, size in sizes:
        rotated = (heads + kv_heads) * size
        spec = LayerSpec(heads, kv_heads, size, size, 1.0)
        merged = sum(projection_sizes(spec))
        cases += [
            ("rms_norm", f"{t} x {hidden}", lambda ops, x, w: ops.rms_norm(x, w, 1e-6),
             [(t, hidden), (hidden,)], 2 * t * hidden),
            ("rms_norm of heads", f"{t} x {heads} x {size}", lambda ops, x, w: ops.rms_norm(x, w, 1e-6),
             [(t, heads, size), (size,)], 2 * t * heads * size),
            ("add_rms_norm", f"{t} x {hidden}", lambda ops, x, r, w: ops.add_rms_norm(x, r, w, 1e-6),
             [(t, hidden), (t, hidden), (hidden,)], 4 * t * hidden),
            ("rotary", f"{t} x {heads}+{kv_heads} x {size}", lambda ops, *args: ops.rotary(*args),
             [(t, heads, size), (t, kv_heads, size), (t, size), (t, size)], t * (2 * rotated + 2 * size)),
            ("rotate_and_write", f"{t} x {heads}+{kv_heads}+{kv_heads} x {size}, norms",
             _timed_rotate_and_write(spec, t, device),
             [(t, merged), (t, size // 2), (t, size // 2), (size,), (size,)], t * (2 * merged + size)),
            ("silu_and_mul", f"{t} x {inner}", lambda ops, x: ops.silu_and_mul(x), [(t, 2 * inner)], 3 * t * inner),
        ]  # fmt: skip
        if not has_fp8(device):
            continue
        cases += [
            ("add_rms_norm_quantized", f"{t} x {hidden}",
             lambda ops, x, r, w: ops.add_rms_norm(x, r, w, 1e-6, quantized=True),
             [(t, hidden), (t, hidden), (hidden,)], 7 * t * hidden // 2),
            ("silu_and_mul_quantized", f"{t} x {inner}", lambda ops, x: ops.silu_and_mul(x, quantized=True),
             [(t, 2 * inner)], 5 * t * inner // 2),
            ("quantize_rows", f"{t} x {heads * size}", lambda ops, x: ops.quantize_rows(x),
             [(t, heads * size)], 3 * t * heads * size // 2),
        ]  # fmt: skip
    return cases


def timed_rows(device: torch.device, quick: bool, rate: float) -> Iterator[dict[str, Any]]:
    for name, shape, function, shapes, elements in timed_cases(device, quick):
        moved = elements * torch.bfloat16.itemsize
        copies = 1 if device.type == "cpu" else min(512, max(2, FLUSH_BYTES // moved))
        operands = [[torch.randn(sizes, device=device).bfloat16() for sizes in shapes] for _ in range(copies)]
        spent, by_torch = (
            seconds([partial(function, ops, *args) for args in operands], device) for ops in (KERNELS, REFERENCE)
        )
        yield dict(name=name, shape=shape, microseconds=spent * 1e6, achieved=moved / spent, limit=rate,
                   ratio=moved / spent / rate, unit="bytes/s", over_torch=by_torch / spent)  # fmt: skip


def make_logits(rows: int, vocab_size: int, peaked: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Peaked: probabilities fall with the rank to the power of 1.5, roughly like a language model's; else normal."""
    if not peaked:
        return torch.randn(rows, vocab_size, device=device).to(dtype)
    ranks = torch.rand(rows, vocab_size, device=device).argsort(-1)
    return ((ranks + 1.0).log() * -1.5 + 0.01 * torch.randn(rows, vocab_size, device=device)).to(dtype)


def sampling_metadata(kind: str, rows: int, vocab_size: int, device: torch.device, seed: int) -> Any:
    params = KINDS[kind]
    table = SamplingTable(rows, vocab_size, device, ops=select_sampling(device))
    for slot in range(rows):
        table.set_row(slot, params[slot % len(params)], seed + slot, [], 1)
    return table.select(np.arange(rows), np.arange(rows) + 1)


def sampling_check_rows(
    device: torch.device, quick: bool, seed: int, sizes: tuple[int, int] | None = None
) -> Iterator[dict[str, Any]]:
    """Number of tokens that differ from those of the CPU's sampler; must be 0.

    Args:
        sizes: rows and vocabulary; None: as the device and `quick` imply.
    """
    implied = (6, 300) if device.type == "cpu" else (36 if quick else 120, VOCABULARY)
    rows, vocab_size = sizes or implied
    cpu = torch.device("cpu")
    kinds = [(True, torch.float32), (False, torch.bfloat16)]
    if device.type == "cuda":
        kinds += [(True, torch.bfloat16), (False, torch.float32)]
    for peaked, dtype in kinds:
        logits, wrong = make_logits(rows, vocab_size, peaked, dtype, device), 0
        for kind in CHECKED:
            got = gpu_sampler.choose(logits, sampling_metadata(kind, rows, vocab_size, device, seed).columns)
            expected = Sampler()(logits.cpu(), sampling_metadata(kind, rows, vocab_size, cpu, seed)).token_ids
            wrong += int((got.cpu() != expected).sum())
        words = "peaked" if peaked else "flat"
        shape = f"{len(CHECKED) * rows} rows, {words}, {str(dtype).removeprefix('torch.')}"
        yield dict(name="sampling is right", shape=shape, achieved=wrong, limit=0, ratio=float(wrong), unit="tokens",
                   passed=wrong == 0)  # fmt: skip


def sampling_rows(device: torch.device, quick: bool, rate: float, seed: int) -> Iterator[dict[str, Any]]:
    batches = [(256, VOCABULARY)] if quick else [(256, VOCABULARY), (64, VOCABULARY), (1, VOCABULARY)]
    if device.type == "cpu":
        batches = [(2, 300)]
    dtypes = (torch.float32,) if quick or device.type == "cpu" else (torch.float32, torch.bfloat16)
    for rows, vocab_size in batches:
        for dtype in dtypes:
            for peaked in (True,) if device.type == "cpu" else (True, False):
                copies = {256: 2, 2: 1}.get(rows, 4)
                logits = [make_logits(rows, vocab_size, peaked, dtype, device) for _ in range(copies)]
                for kind in KINDS if device.type == "cuda" else CHECKED:
                    metadata = sampling_metadata(kind, rows, vocab_size, device, seed)
                    spent = seconds([partial(gpu_sampler.choose, copy, metadata.columns) for copy in logits], device)
                    size = rows * vocab_size * dtype.itemsize
                    words = f"{rows} x {vocab_size} {str(dtype).removeprefix('torch.')}"
                    row = dict(name=f"sampling, {kind}", shape=f"{words}, {'peaked' if peaked else 'flat'}",
                               microseconds=spent * 1e6, achieved=size / spent, limit=rate,
                               ratio=size / spent / rate, unit="bytes/s")  # fmt: skip
                    if rows == 256 and kind != "top_k 3000":
                        row |= dict(target=SAMPLING_TARGET * 1e6, passed=spent <= SAMPLING_TARGET)
                    yield row


def run(device: torch.device, quick: bool = False, rate: float | None = None) -> Iterator[dict[str, Any]]:
    """Rows {name, shape, error | microseconds, achieved, limit, ratio, unit, ...} as they are measured.

    Sampling comes first, because it has targets; the small operations follow.

    `achieved` and `limit` are bytes/s, relative errors or numbers of tokens, according to `unit`; `ratio` is their
    quotient.  `over_torch` is the speedup over `ReferenceOps`; `target` is in microseconds.  Checks and rows
    with a target have `passed`.
    """
    seed = int.from_bytes(os.urandom(4), "little")
    torch.manual_seed(seed)
    rate = rate or copy_rate(device)
    parts = (
        lambda: sampling_rows(device, quick, rate, seed),
        lambda: sampling_check_rows(device, quick, seed),
        lambda: expert_check_rows(device),
        lambda: int4_check_rows(device),
        lambda: timed_rows(device, quick, rate),
        lambda: expert_rows(device, quick),
        lambda: block_fp8_rows(device, quick),
        lambda: int4_rows(device, quick),
        lambda: few_row_rows(device, quick),
        lambda: check_rows(device, quick),
        lambda: quantized_check_rows(device),
    )
    for part in parts:
        for row in part():
            yield dict(row, seed=seed)
