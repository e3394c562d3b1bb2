"""int8 keys and values: the kernel computes with quantized and dequantized values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_case import PagedCase, relative_error

from inflight.attention import int8_kv as int8
from inflight.attention.base import AttentionBackend, LayerSpec
from inflight.attention.reference import ReferenceAttention
from inflight.kernels.cpu import library
from inflight.kernels.cpu.cpu_attention import CpuAttention

pytestmark = [
    pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable())),
    pytest.mark.usefixtures("one_thread"),
]

SIZES = [8, 32, 40, 64, 72, 96, 128, 256]
LLAMA = LayerSpec(6, 2, 64, 64, 0.125, kv_cache_dtype=torch.int8)


@st.composite
def cases(draw: st.DrawFn) -> PagedCase:
    kv_heads = draw(st.integers(1, 3))
    size = draw(st.sampled_from(SIZES))
    spec = LayerSpec(
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 4, 7, 12])),
        num_kv_heads=kv_heads,
        key_head_size=size,
        value_head_size=draw(st.one_of(st.just(size), st.sampled_from(SIZES))),
        scaling=draw(st.sampled_from([size**-0.5, 0.02, 1.0])),
        sliding_window=draw(st.one_of(st.none(), st.integers(1, 200))),
        softcap=draw(st.sampled_from([None, None, 5.0, 50.0])),
        has_sinks=draw(st.booleans()),
        kv_cache_dtype=torch.int8,
    )
    seq_lens = draw(st.lists(st.one_of(st.integers(1, 40), st.integers(1, 700)), min_size=1, max_size=3))
    query_lens = [draw(st.one_of(st.just(1), st.integers(1, min(length, 100)))) for length in seq_lens]
    block_size = draw(st.sampled_from([1, 5, 8, 16, 16, 48, 256]))
    layout = draw(st.sampled_from(["heads first", "fused", "size strided"]))
    return PagedCase(spec, seq_lens, query_lens, block_size, layout=layout, seed=draw(st.integers(0, 2**16)))


def few(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


@few(20)
@given(case=cases())
def test_float32_queries_agree_with_the_reference(isa: str, case: PagedCase) -> None:
    assert relative_error(case.run(CpuAttention()), case.run(ReferenceAttention())) < 1e-5


@few(20)
@given(case=cases(), dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_half_precision_is_as_precise_as_torch(isa: str, case: PagedCase, dtype: torch.dtype) -> None:
    """Both compared with float32 on the same bytes: queries, weights and results are rounded."""
    case = case.with_dtype(dtype)
    exact = case.with_dtype(torch.float32).run(ReferenceAttention())
    allowed = 2 * max(relative_error(case.run(ReferenceAttention()), exact), torch.finfo(dtype).eps / 4)
    assert relative_error(case.run(CpuAttention()), exact) < allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [16, 7])
def test_the_pool_contains_quantized_values(isa: str, dtype: torch.dtype, block_size: int) -> None:
    """Attention to a single key returns its value: byte times scale."""
    case = PagedCase(LLAMA, [1], [1], block_size, dtype)
    case.values[0][0, 0] *= 1e-3
    case.values[0][0, 1, :60] = 0.0
    expected = int8.dequantize(*int8.quantize(case.values[0]), torch.float32).repeat_interleave(3, dim=1)
    error = (case.run(CpuAttention()).float() - expected).abs()
    # A byte off by one would cause an error of at least 1 / 127.
    assert (error <= expected.abs() * (3e-7 if dtype == torch.float32 else 0.501 * torch.finfo(dtype).eps)).all()


@pytest.mark.parametrize("size", [8, 64, 1024])
def test_the_quantization_error_is_at_most_half_a_step(size: int) -> None:
    rows = torch.randn(100, 3, size) * torch.logspace(-6, 6, 100)[:, None, None]
    elements, scale = int8.quantize(rows)
    assert elements.abs().max() == 127 and (elements.abs().amax(-1) >= 126).all()
    error = (int8.dequantize(elements, scale, torch.float32) - rows).abs().amax(-1)
    assert (error <= 0.5001 * scale.float()).all()
    assert torch.equal(int8.unpack(int8.pack(rows), torch.float32), int8.dequantize(elements, scale, torch.float32))


def test_rows_of_zeros_stay_zero_and_infinity_becomes_nan() -> None:
    rows = torch.zeros(4, 8)
    rows[1, 3], rows[2, 3], rows[3, 3] = torch.inf, torch.nan, 1e-35
    back = int8.unpack(int8.pack(rows), torch.float32)
    assert torch.equal(back[0], rows[0]) and torch.equal(back[3], rows[0])
    assert back[1:3].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
def test_infinity_and_nan_reach_the_output(isa: str, dtype: torch.dtype, broken: float) -> None:
    case = PagedCase(LLAMA, [40], [40], 16, dtype)
    case.values[0][20, 0, 5] = broken
    out = case.run(CpuAttention())
    assert out[20:, :3].isnan().all()
    assert out[:, 3:].isfinite().all()


def test_many_small_weights_are_not_rounded_to_zero(isa: str) -> None:
    """One key has half of the weight, 8191 share the rest: each tile's weights have their scale."""
    case = PagedCase(replace(LLAMA, scaling=1.0), [8192], [1], 16, torch.bfloat16)
    case.keys[0].zero_()
    case.query.zero_()
    case.query[..., 0], case.keys[0][0, :, 0] = 3.0, 3.0  # exp(9) is about 8100
    exact = case.with_dtype(torch.float32).run(ReferenceAttention())
    assert relative_error(case.run(CpuAttention()), exact) < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("backend", [CpuAttention(), ReferenceAttention()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("block_size", [16, 5])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
def test_a_pool_takes_bytes_per_token(backend: AttentionBackend, block_size: int, kv_dtype: torch.dtype | None) -> None:
    spec = replace(LLAMA, value_head_size=40, kv_cache_dtype=kv_dtype)
    cache = backend.new_cache(6, block_size, spec, torch.bfloat16, torch.device("cpu"))
    assert cache.key.nbytes + cache.value.nbytes == 6 * block_size * spec.bytes_per_token(torch.bfloat16)


def test_int8_takes_half_of_bfloat16_plus_two_bytes_per_row() -> None:
    half = replace(LLAMA, kv_cache_dtype=None).bytes_per_token(torch.bfloat16) / 2
    assert LLAMA.bytes_per_token(torch.bfloat16) == half + 2 * 2 * 2


@pytest.mark.parametrize("block_size", [16, 5])
def test_write_touches_the_mapped_slots_only(isa: str, block_size: int) -> None:
    """Slots in any order, -1 skipped; everything else in the pool is bitwise unchanged."""
    case = PagedCase(LLAMA, [40], [1], block_size, torch.bfloat16)
    backend = CpuAttention()
    cache = case.filled_cache(backend)
    before = cache.key.clone(), cache.value.clone()
    metadata = case.metadata([40])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    metadata.slot_mapping = metadata.slot_mapping[order].clone()
    metadata.slot_mapping[::2] = -1
    case.keys[0][order[1::2]] *= 2
    case.values[0][order[1::2]] *= 2
    key, value = case.keys[0][order].clone(), case.values[0][order].clone()
    key[::2], value[::2] = 7.0, 7.0
    backend.write(key, value, cache, backend.prepare(metadata))
    assert torch.equal(case.attend(backend, cache), case.run(backend))
    # Doubled values have the same bytes and twice the scale.
    changed = [(tensor != old).sum().item() for tensor, old in zip((cache.key, cache.value), before)]
    assert sum(changed) <= 20 * 2 * 2 * int8.SCALE_BYTES
