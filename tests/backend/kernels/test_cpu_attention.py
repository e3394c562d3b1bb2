"""The CPU kernel computes the same as the reference, for all shapes it supports."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nightly import nightly_but
from paged_case import PagedCase, relative_error

from inflight.attention.base import LayerSpec
from inflight.attention.reference import ReferenceAttention
from inflight.kernels.cpu import library
from inflight.kernels.cpu.cpu_attention import CpuAttention

pytestmark = [
    pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable())),
    pytest.mark.usefixtures("one_thread"),
]

SIZES = [8, 16, 32, 40, 64, 72, 80, 96, 128, 256]


@st.composite
def specs(draw: st.DrawFn) -> LayerSpec:
    kv_heads = draw(st.integers(1, 3))
    size = draw(st.sampled_from(SIZES))
    return LayerSpec(
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 12])),
        num_kv_heads=kv_heads,
        key_head_size=size,
        value_head_size=draw(st.one_of(st.just(size), st.sampled_from(SIZES))),
        scaling=draw(st.sampled_from([size**-0.5, 0.02, 1.0])),
        sliding_window=draw(st.one_of(st.none(), st.integers(1, 200), st.just(512))),
        softcap=draw(st.sampled_from([None, None, 5.0, 50.0])),
        has_sinks=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn) -> PagedCase:
    seq_lens, query_lens = [], []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.one_of(st.integers(1, 40), st.integers(1, 700), st.sampled_from([16, 64, 128, 512, 1024])))
        seq_lens.append(length)
        query_lens.append(draw(st.one_of(st.just(1), st.integers(1, min(length, 200)))))
    return PagedCase(
        spec=draw(specs()),
        seq_lens=seq_lens,
        query_lens=query_lens,
        block_size=draw(st.sampled_from([1, 3, 8, 15, 16, 16, 32, 48, 64, 256, 1024])),
        layout=draw(st.sampled_from(["heads first", "fused", "size strided", "contiguous"])),
        seed=draw(st.integers(0, 2**16)),
    )


def few(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


@few(15)
@given(case=cases())
def test_float32_agrees_with_the_reference(isa: str, case: PagedCase) -> None:
    out = case.run(CpuAttention())
    assert relative_error(out, case.run(ReferenceAttention())) < 1e-5


@few(15)
@given(case=cases(), dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_half_precision_is_as_precise_as_torch(isa: str, case: PagedCase, dtype: torch.dtype) -> None:
    """Both compared with float32 on the same rounded inputs."""
    case = case.with_dtype(dtype)
    exact = case.with_dtype(torch.float32).run(ReferenceAttention())
    out = case.run(CpuAttention())
    assert out.dtype == dtype
    rounding = torch.finfo(dtype).eps / 4
    allowed = 2 * max(relative_error(case.run(ReferenceAttention()), exact), rounding)
    assert relative_error(out, exact) < allowed


LLAMA = LayerSpec(num_heads=6, num_kv_heads=2, key_head_size=64, value_head_size=64, scaling=0.125)
LLAMA_INT8 = replace(LLAMA, kv_cache_dtype=torch.int8)
EVERY_FEATURE = LayerSpec(4, 2, 64, 32, 0.1, sliding_window=90, softcap=30.0, has_sinks=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "spec",
    [LLAMA, LLAMA_INT8, EVERY_FEATURE, replace(EVERY_FEATURE, kv_cache_dtype=torch.int8)],
    ids=["plain", "plain int8", "every feature", "every feature int8"],
)
class TestBitwise:
    """A token's result depends only on the tokens it attends to, bitwise."""

    LENS = (1, 17, 600, 1300)

    @staticmethod
    @functools.cache
    def expected(isa: str, spec: LayerSpec, dtype: torch.dtype) -> torch.Tensor:
        """Each request's last token, computed from whole prompts in one batch on one thread."""
        lens = list(TestBitwise.LENS)
        case = PagedCase(spec, lens, lens, 16, dtype)
        ends = torch.tensor(case.query_lens).cumsum(0) - 1
        return TestBitwise.on_threads(case, 1)[ends]

    @staticmethod
    def on_threads(case: PagedCase, threads: int) -> torch.Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return case.run(CpuAttention())
        finally:
            torch.set_num_threads(before)

    @pytest.mark.parametrize("threads", nightly_but([7], [1, 2, 7]))
    def test_in_any_chunks_on_any_threads(self, isa: str, spec: LayerSpec, dtype: torch.dtype, threads: int) -> None:
        expected = self.expected(isa, spec, dtype)
        for query_lens in ([1, 1, 1, 1], [1, 5, 333, 48], [1, 17, 1, 1300]):
            out = self.on_threads(PagedCase(spec, list(self.LENS), query_lens, 16, dtype), threads)
            assert torch.equal(out[torch.tensor(query_lens).cumsum(0) - 1], expected)

    @pytest.mark.parametrize("block_size", nightly_but([7, 1024], [1, 7, 32, 1024]))
    def test_with_any_block_size(self, isa: str, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> None:
        out = PagedCase(spec, list(self.LENS), [1] * 4, block_size, dtype).run(CpuAttention())
        assert torch.equal(out, self.expected(isa, spec, dtype))

    def test_in_any_batch(self, isa: str, spec: LayerSpec, dtype: torch.dtype) -> None:
        case = PagedCase(spec, list(self.LENS), [1] * 4, 16, dtype)
        alone = PagedCase(spec, [1300], [1], 16, dtype)
        alone.keys, alone.values = case.keys[3:], case.values[3:]
        alone.query, alone.sinks = case.query[3:], case.sinks
        assert torch.equal(self.on_threads(alone, 2), self.on_threads(case, 2)[3:])


@pytest.mark.parametrize("block_size", [16, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_write_touches_the_mapped_slots_only(isa: str, dtype: torch.dtype, block_size: int) -> None:
    """Slots in any order, -1 skipped; everything else in the pool is bitwise unchanged."""
    case = PagedCase(LLAMA, [40], [1], block_size, dtype)
    backend = CpuAttention()
    cache = case.filled_cache(backend)
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
    written = [tensor.isfinite().sum().item() for tensor in (cache.key, cache.value)]
    assert written == [40 * 2 * 64] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_to_a_single_key_returns_its_value(isa: str, dtype: torch.dtype) -> None:
    """Including huge, infinite and (except in bfloat16 products, which flush them) subnormal numbers."""
    case = PagedCase(LLAMA, [1], [1], 16, dtype)
    info = torch.finfo(dtype)
    case.values[0][0, :, :4] = torch.tensor([0.0, info.tiny, -info.max, torch.inf], dtype=dtype)
    if dtype != torch.bfloat16:
        case.values[0][0, :, 8:40] *= info.smallest_normal
    assert torch.equal(case.run(CpuAttention())[0], case.values[0][0].repeat_interleave(3, dim=0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_unbiased(isa: str, dtype: torch.dtype) -> None:
    case = PagedCase(LLAMA, [300], [200], 16, dtype)
    exact = case.with_dtype(torch.float32).run(ReferenceAttention())
    error = (case.run(CpuAttention()).float() - exact) * exact.sign()
    assert abs(error.mean() / exact.abs().mean()) < torch.finfo(dtype).eps / 30


def test_a_request_without_tokens_in_the_step_is_skipped(isa: str) -> None:
    case = PagedCase(LLAMA, [30, 20, 10], [3, 0, 1], 16)
    assert relative_error(case.run(CpuAttention()), case.run(ReferenceAttention())) < 1e-5


def test_long_contexts_are_split_over_threads(isa: str) -> None:
    spec = LayerSpec(4, 1, 32, 32, 32**-0.5)
    case = PagedCase(spec, [9000, 5], [1, 5], 16)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        out = case.run(CpuAttention())
    finally:
        torch.set_num_threads(before)
    assert relative_error(out, case.run(ReferenceAttention())) < 1e-5


def test_more_query_heads_per_kv_head_than_an_item_has_rows(isa: str) -> None:
    case = PagedCase(LayerSpec(50, 1, 32, 32, 0.2, sliding_window=100), [300, 40], [300, 40], 16)
    assert relative_error(case.run(CpuAttention()), case.run(ReferenceAttention())) < 1e-5


def test_scores_far_apart_neither_overflow_nor_vanish(isa: str) -> None:
    """With logits in the thousands the softmax is one-hot; the other weights are exactly zero."""
    spec = LayerSpec(2, 1, 64, 64, 300.0)
    case = PagedCase(spec, [700], [50], 16)
    out = case.run(CpuAttention())
    assert out.isfinite().all()
    assert relative_error(out, case.run(ReferenceAttention())) < 1e-4
