"""The kernels of small operations and sampling compile for real GPUs, once for all batches.  Needs no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compiled_kernels import compiled

pytest.importorskip("triton")

SCRIPT = """
import json, sys
import torch
from gpu_target import target
from inflight.attention.base import AttentionMetadata, LayerAttention, LayerSpec
from inflight.kernels.gpu.gpu_ops import GpuOps
from inflight.kernels.gpu import gpu_kv_cache, gpu_penalties, gpu_sampler
from inflight.ops.base import Angles, HeadNorms
from inflight.sampling.metadata import COLUMN_LINES
from inflight.sampling.ops import PenalisedTokens
from inflight.sampling.reference_sampling import REFERENCE

def layer_and_batch(tokens, kv_dtype):
    spec = LayerSpec(16, 8, 128, 128, 1.0, kv_cache_dtype=kv_dtype)
    cache = gpu_kv_cache.new_cache(4, 16, spec, dtype, torch.device("cpu"))
    slots = torch.zeros(tokens + 3, dtype=torch.int64)[3:]  # at any place of a step's packed buffer
    metadata = AttentionMetadata(slots, slots, slots, slots, [], [], 1, 1, 16)
    return LayerAttention(spec, None, cache), metadata

arch, dtype, vocab_size = json.loads(sys.argv[1])
dtype, ops = getattr(torch, dtype), GpuOps()
with target(arch) as compiled:
    for tokens in (1, 2, 16, 33):
        merged = torch.empty(tokens, 32, 128, dtype=dtype)
        query, key, _ = merged.split((16, 8, 8), dim=1)
        hidden, angles = torch.empty(tokens, 1024, dtype=dtype), torch.empty(tokens, 128, dtype=dtype)
        ops.rms_norm(hidden, torch.empty(1024, dtype=dtype), 1e-6)
        ops.rms_norm(query, torch.empty(128, dtype=dtype), 1e-6)
        ops.add_rms_norm(hidden, hidden.clone(), torch.empty(1024, dtype=dtype), 1e-6)
        ops.rotary(query, key, angles, angles)
        ops.silu_and_mul(torch.empty(tokens, 6144, dtype=dtype))
        table, positions = torch.empty(40960, 64, dtype=dtype), torch.zeros(tokens + 1, dtype=torch.int64)[1:]
        angles = Angles(table, table, 128, positions)
        norms = HeadNorms(torch.empty(128, dtype=dtype), torch.empty(128, dtype=dtype), 1e-6)
        qkv = torch.empty(tokens, 32 * 128, dtype=dtype)
        ops.rotate_and_write(qkv, *layer_and_batch(tokens, None), norms, angles)
        if arch >= 89:
            ops.quantize_rows(hidden)
            ops.rms_norm(hidden, torch.empty(1024, dtype=dtype), 1e-6, quantized=True)
            ops.add_rms_norm(hidden, hidden.clone(), torch.empty(1024, dtype=dtype), 1e-6, quantized=True)
            ops.silu_and_mul(torch.empty(tokens, 6144, dtype=dtype), quantized=True)
            ops.rotate_and_write(qkv, *layer_and_batch(tokens, torch.float8_e4m3fn), None, angles)
        columns = torch.zeros(COLUMN_LINES, tokens + 7, dtype=torch.int64)
        for part in (columns, columns[:, :tokens], columns[:, 1 : tokens + 1]):
            gpu_sampler.choose(torch.empty(tokens, vocab_size, dtype=dtype), part)
        index, of_row = (torch.empty(7 * tokens, dtype=torch.int64) for _ in range(2))
        penalised = PenalisedTokens(REFERENCE, index, torch.empty(7 * tokens), of_row, torch.empty(3, tokens))
        gpu_penalties.penalise(torch.empty(tokens, vocab_size), penalised)
print(json.dumps([kernel.report(arch) for kernel in compiled]))
"""
ONCE = [
    "add_rms_norm_kernel",
    "choose_kernel",
    "penalise_kernel",
    "rotary_kernel",
    "rotate_and_write_kernel",
    "silu_and_mul_kernel",
]
# Results in e4m3, which has no conversion before compute capability 8.9; an fp8 pool.
QUANTIZING = [
    "add_rms_norm_kernel",
    "quantize_rows_kernel",
    "rms_norm_kernel",
    "rotate_and_write_kernel",
    "silu_and_mul_quantized_kernel",
]


SOURCES = [
    "backend/inflight/attention/base.py",
    "backend/inflight/kernels/gpu",
    "backend/inflight/ops/base.py",
    "backend/inflight/sampling/metadata.py",
    "backend/inflight/sampling/noise.py",
    "tests/support/gpu_target.py",
]


@pytest.mark.nightly  # test_gpu_step_inputs_compile.py compiles in make test
@pytest.mark.parametrize(
    ("arch", "dtype", "vocab_size"), [(90, "bfloat16", 151936), (80, "float16", 50257), (100, "bfloat16", 128256)]
)
def test_one_variant_for_all_batches(
    tmp_path: Path, cache: pytest.Cache, arch: int, dtype: str, vocab_size: int
) -> None:
    kernels: list[dict[str, Any]] = compiled(cache, tmp_path, "ops", SCRIPT, [arch, dtype, vocab_size], SOURCES)
    quantizing = QUANTIZING if arch >= 89 else []
    assert sorted(kernel["kernel"] for kernel in kernels) == sorted(
        [*ONCE, "rms_norm_kernel", "rms_norm_kernel", *quantizing]
    )
    for kernel in kernels:
        if kernel["kernel"] == "choose_kernel":
            # Two programs of 512 threads share a multiprocessor's registers and shared memory.
            assert kernel["registers"] <= 64
            assert kernel["shared_bytes"] <= kernel["shared_limit"] // 2
            if vocab_size % 16 == 0:  # otherwise rows are not aligned
                assert kernel["instructions"] == ["cp.async.cg"], "asynchronous loads"
        else:
            assert kernel["stack_bytes"] == 0, "nothing spills"
