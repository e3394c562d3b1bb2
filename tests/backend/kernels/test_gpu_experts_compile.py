"""The kernels of experts compile for real GPUs, at load and not later.  Needs no GPU."""

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
from inflight.kernels.gpu.gpu_experts import GpuExperts
from inflight.ops.experts import ExpertProducts, ExpertWeights, SwiGlu

def weights(*size, packed):
    if not packed:
        return ExpertWeights(torch.empty(*size, dtype=dtype))
    numbers, scales = (torch.empty(*size[:2], size[2] // share, dtype=torch.uint8) for share in (2, 32))
    return ExpertWeights(numbers, scales, torch.empty(*size[:2], dtype=dtype))

arch, dtype, num_experts, hidden, inner, num_choices, packed = json.loads(sys.argv[1])
dtype = getattr(torch, dtype)
gate = SwiGlu(True, 7.0, 1.702) if packed else SwiGlu()
parts = [weights(num_experts, *size, packed=packed) for size in ((2 * inner, hidden), (hidden, inner))]
experts = ExpertProducts(*parts, gate)
with target(arch) as compiled:
    GpuExperts().prepare(experts, dtype)
    at_load = len(compiled)
    for tokens in (1, 2, 16, 33, 300, 2048):
        x = torch.empty(tokens, hidden, dtype=dtype)
        index = torch.zeros(tokens, num_choices, dtype=torch.int64)
        GpuExperts().experts(x, experts, index, torch.zeros(tokens, num_choices, dtype=dtype))
print(json.dumps([at_load, [kernel.report(arch) for kernel in compiled]]))
"""
SOURCES = ["backend/inflight/kernels/gpu", "backend/inflight/ops/experts.py", "tests/support/gpu_target.py"]
GPT_OSS_20B = [32, 2880, 2880, 4, True]
QWEN3_30B_A3B = [128, 2048, 768, 8, False]
PRODUCT = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}


@pytest.mark.nightly  # test_gpu_step_inputs_compile.py compiles in make test
@pytest.mark.parametrize(
    ("arch", "dtype", "shape"),
    [
        (90, "bfloat16", GPT_OSS_20B),
        (80, "bfloat16", GPT_OSS_20B),
        (90, "float16", GPT_OSS_20B),
        (100, "bfloat16", GPT_OSS_20B),
        (120, "bfloat16", GPT_OSS_20B),
        (80, "bfloat16", QWEN3_30B_A3B),
        (90, "bfloat16", QWEN3_30B_A3B),
        (120, "bfloat16", QWEN3_30B_A3B),
    ],
)
def test_everything_is_compiled_at_load(
    tmp_path: Path, cache: pytest.Cache, arch: int, dtype: str, shape: list[Any]
) -> None:
    """Two products for each of three tiles, whatever the batch.  Nothing spills but two registers, by triton 3.6."""
    argument = [arch, dtype, *shape]
    at_load, kernels = compiled(cache, tmp_path, "experts", SCRIPT, argument, SOURCES)
    assert at_load == len(kernels) == 8, [kernel["kernel"] for kernel in kernels]
    products = [kernel for kernel in kernels if kernel["kernel"] == "product_kernel"]
    assert sorted(kernel["block_m"] for kernel in products) == [16, 16, 64, 64, 128, 128]
    for kernel in products:
        assert kernel["shared_bytes"] <= kernel["shared_limit"]
        assert kernel["instructions"] == ["cp.async.cg", PRODUCT[arch]], "asynchronous loads, tensor cores"
        assert not kernel["tf32"]
    assert sum(kernel["stack_bytes"] for kernel in kernels) <= (8 if arch == 80 else 0)
