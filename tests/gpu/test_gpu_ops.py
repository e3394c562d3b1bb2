"""The kernels of the small operations, compiled and run on a GPU; skipped without one."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import gpu_ops

from inflight.ops.selection import select_ops

CUDA = torch.device("cuda")


def test_all_kernels_agree_with_the_reference() -> None:
    """Strided rows surrounded by NaN, results initialised with NaN; float32, bfloat16 and float16."""
    torch.manual_seed(1)
    failed = [row for row in gpu_ops.check_rows(CUDA, quick=False) if not row["passed"]]
    assert not failed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_elementwise_kernels_are_bitwise_equal_to_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    query, key = (torch.randn(77, heads, 128, device=CUDA).to(dtype) for heads in (32, 8))
    cos, sin = torch.randn(2, 77, 128, device=CUDA).to(dtype)
    expected = query.clone(), key.clone()
    gpu_ops.REFERENCE.rotary(*expected, cos, sin)
    gpu_ops.KERNELS.rotary(query, key, cos, sin)
    assert torch.equal(query, expected[0])
    assert torch.equal(key, expected[1])
    x, residual = torch.randn(2, 77, 1024, device=CUDA).to(dtype)
    total = residual.clone()
    gpu_ops.REFERENCE.add_rms_norm(x, total, cos.new_ones(1024), 1e-6)
    gpu_ops.KERNELS.add_rms_norm(x, residual, cos.new_ones(1024), 1e-6)
    assert torch.equal(residual, total)


def test_more_tokens_than_a_grid_dimension() -> None:
    x = torch.randn(70000, 64, device=CUDA)
    torch.testing.assert_close(gpu_ops.KERNELS.silu_and_mul(x), gpu_ops.REFERENCE.silu_and_mul(x))
    weight = torch.randn(64, device=CUDA)
    torch.testing.assert_close(gpu_ops.KERNELS.rms_norm(x, weight, 1e-6), gpu_ops.REFERENCE.rms_norm(x, weight, 1e-6))


def test_a_gpu_uses_them() -> None:
    assert select_ops(CUDA).name == "gpu"
