"""The kernels of the small operations, compiled and run on a GPU; skipped without one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import gpu_ops
from card_sizes import sized
from emulated_card import is_emulated

from inflight.attention.base import LayerAttention, LayerSpec
from inflight.kernels.gpu import gpu_kv_cache
from inflight.kernels.gpu.gpu_attention import GpuAttention
from inflight.kernels.registry import select_ops
from inflight.ops.base import Angles, HeadNorms
from inflight.ops.reference_ops import rotate_and_write_in_parts

CUDA = torch.device("cuda")


def test_all_kernels_agree_with_the_reference() -> None:
    """Strided rows surrounded by NaN, results initialised with NaN; float32, bfloat16 and float16."""
    torch.manual_seed(1)
    failed = [row for row in gpu_ops.check_rows(CUDA, False, tiny=is_emulated()) if not row["passed"]]
    assert not failed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_elementwise_kernels_are_bitwise_equal_to_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    count = sized(77, 7)
    query, key = (torch.randn(count, heads, 128, device=CUDA).to(dtype) for heads in sized((32, 8), (4, 1)))
    cos, sin = torch.randn(2, count, 128, device=CUDA).to(dtype)
    expected = query.clone(), key.clone()
    gpu_ops.REFERENCE.rotary(*expected, cos, sin)
    gpu_ops.KERNELS.rotary(query, key, cos, sin)
    assert torch.equal(query, expected[0])
    assert torch.equal(key, expected[1])
    x, residual = torch.randn(2, count, 1024, device=CUDA).to(dtype)
    total = residual.clone()
    gpu_ops.REFERENCE.add_rms_norm(x, total, cos.new_ones(1024), 1e-6)
    gpu_ops.KERNELS.add_rms_norm(x, residual, cos.new_ones(1024), 1e-6)
    assert torch.equal(residual, total)


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_rotary_and_write_in_one_are_bitwise_the_separate_kernels(
    dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    """Also where rows are padding, and on a pool whose other slots stay as they were."""
    torch.manual_seed(3)
    count, heads, kv_heads = sized((77, 32, 8), (13, 4, 2))
    slots = torch.randperm(128, device=CUDA)[:count]
    slots[::5] = -1
    spec = LayerSpec(heads, kv_heads, 128, 128, 1.0, kv_cache_dtype=kv_dtype)
    backend = GpuAttention()
    pools = [backend.new_cache(8, 16, spec, dtype, CUDA) for _ in range(2)]
    for pool in pools:
        pool.key.view(torch.uint8).fill_(0x5B)
        pool.value.view(torch.uint8).fill_(0x5B)
    metadata = replace(gpu_kv_cache.one_request(count, 16, CUDA), slot_mapping=slots)
    qkv = torch.randn(count, (heads + 2 * kv_heads) * 128, device=CUDA).to(dtype)
    query_weight, key_weight = torch.randn(2, 128, device=CUDA).to(dtype)
    norms = HeadNorms(query_weight, key_weight, 1e-6)
    cos, sin = torch.randn(2, 500, 64, device=CUDA).to(dtype)
    angles = Angles(cos, sin, 128, torch.randint(500, (count,), device=CUDA))
    ours, parts = (LayerAttention(spec, backend, pool) for pool in pools)
    batch = backend.prepare(metadata)
    expected = rotate_and_write_in_parts(gpu_ops.KERNELS, qkv.clone(), parts, batch, norms, angles)
    assert torch.equal(gpu_ops.KERNELS.rotate_and_write(qkv, ours, batch, norms, angles), expected)
    for got, right in ((pools[0].key, pools[1].key), (pools[0].value, pools[1].value)):
        assert torch.equal(got.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="no e4m3 before compute capability 8.9")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantized_rows_are_bitwise_equal_to_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    x = torch.randn(sized(77, 7), 4096, device=CUDA).to(dtype)
    got, expected = gpu_ops.KERNELS.quantize_rows(x), gpu_ops.REFERENCE.quantize_rows(x)
    assert torch.equal(got.scales, expected.scales)
    assert torch.equal(got.values.view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="no e4m3 before compute capability 8.9")
def test_norms_and_gates_quantize_what_they_would_store() -> None:
    torch.manual_seed(5)
    assert not [row for row in gpu_ops.quantized_check_rows(CUDA, sized(65, 9)) if not row["passed"]]


def test_more_tokens_than_a_grid_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    if is_emulated():
        from emulated_card import kernels as emulated_kernels

        monkeypatch.setattr(emulated_kernels, "GRID_LIMITS", (2**31 - 1, 63, 63))
    x = torch.randn(sized(70000, 70), 64, device=CUDA)
    torch.testing.assert_close(gpu_ops.KERNELS.silu_and_mul(x), gpu_ops.REFERENCE.silu_and_mul(x))
    weight = torch.randn(64, device=CUDA)
    torch.testing.assert_close(gpu_ops.KERNELS.rms_norm(x, weight, 1e-6), gpu_ops.REFERENCE.rms_norm(x, weight, 1e-6))


def test_a_gpu_uses_them() -> None:
    assert select_ops(CUDA).name == "gpu"
