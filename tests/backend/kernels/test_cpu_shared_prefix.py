"""Requests with the same first blocks: keys are read once for all, and every bit of the results stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_prefix_case import SharedPrefixCase, metadata_of

from inflight.attention.base import LayerSpec
from inflight.kernels.cpu import library
from inflight.kernels.cpu.cpu_attention import CpuAttention

pytestmark = [
    pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable())),
    pytest.mark.usefixtures("one_thread"),
]

CHUNK = 512  # keys in a partial result of the kernel: what is shared is counted in these
LLAMA = LayerSpec(num_heads=6, num_kv_heads=2, key_head_size=64, value_head_size=64, scaling=0.125)


def batch_of(lens: list[int], parents: list[tuple[int, int]], **options: object) -> SharedPrefixCase:
    arguments = {"spec": LLAMA, "seq_lens": lens, "query_lens": [1] * len(lens), "block_size": 16} | options
    return SharedPrefixCase(**arguments, parents=tuple(parents))  # type: ignore[arg-type]


@st.composite
def trees(draw: st.DrawFn) -> SharedPrefixCase:
    """Each request continues an earlier one's first blocks: none, some, or many."""
    block_size = draw(st.sampled_from([1, 7, 16, 16, 48, 512, 1024]))
    lens, queries, parents = list[int](), list[int](), list[tuple[int, int]]()
    for number in range(draw(st.integers(2, 6))):
        parent = draw(st.integers(0, max(0, number - 1)))
        most = lens[parent] // block_size if number else 0
        blocks = draw(st.one_of(st.just(most), st.integers(0, most)))
        queries.append(draw(st.one_of(st.just(1), st.integers(1, 20))))
        own = draw(st.sampled_from([0, 1, 15, 400, 1100]))
        lens.append(max(blocks * block_size, 1200 if number == 0 else 0) + own + queries[-1])
        parents.append((parent, blocks))
    kv_heads, size = draw(st.integers(1, 3)), draw(st.sampled_from([8, 16, 40]))
    spec = LayerSpec(
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 5, 12])),
        num_kv_heads=kv_heads,
        key_head_size=size,
        value_head_size=draw(st.sampled_from([8, 24])),
        scaling=0.2,
        sliding_window=draw(st.sampled_from([None, None, None, 600])),
        softcap=draw(st.sampled_from([None, None, 20.0])),
        has_sinks=draw(st.booleans()),
        kv_cache_dtype=draw(st.sampled_from([None, None, torch.int8])),
    )
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return SharedPrefixCase(
        spec, lens, queries, block_size, dtype, "contiguous", draw(st.integers(0, 99)), parents=tuple(parents)
    )


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=trees(), threads=st.sampled_from([1, 2, 7]))
def test_results_are_those_of_separate_blocks_to_the_bit(isa: str, case: SharedPrefixCase, threads: int) -> None:
    shared, separate = case.both(threads)
    assert not shared.isnan().any()
    assert torch.equal(shared, separate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_document_asked_by_many(isa: str, dtype: torch.dtype) -> None:
    """More rows than an item has, and a document that a team divides among its threads."""
    spec = replace(LLAMA, kv_cache_dtype=torch.int8) if dtype == torch.int8 else LLAMA
    lens = [1560 + 3 * number for number in range(14)]
    case = batch_of(lens, [(0, 96)] * 14, spec=spec, dtype=torch.bfloat16 if dtype == torch.int8 else dtype)
    shared, separate = case.both(threads=7)
    assert torch.equal(shared, separate)
    keys_read, keys = case.keys_read(threads=7)
    assert keys_read < keys / 2


@pytest.mark.parametrize("threads", [1, 7])
class TestKeysRead:
    """However they are divided among threads."""

    def test_a_prefix_is_read_once_for_as_many_rows_as_share_a_pass(self, threads: int) -> None:
        lens = [2100 + number for number in range(12)]
        shared, separate = batch_of(lens, [(0, 128)] * 12).keys_read(threads)
        assert separate == 2 * sum(lens)
        assert shared == 2 * (4 * CHUNK + sum(length - 4 * CHUNK for length in lens))

    def test_more_requests_than_fit_one_pass_take_several(self, threads: int) -> None:
        """Twelve rows of three query heads are a pass."""
        case = batch_of([1100] * 25, [(0, 64)] * 25)
        assert case.keys_read(threads)[0] == 2 * (3 * 2 * CHUNK + 25 * (1100 - 2 * CHUNK))

    def test_conversations_of_one_system_prompt(self, threads: int) -> None:
        """All begin alike; two and two go on alike."""
        case = batch_of([2000] * 4, [(0, 64), (0, 64), (0, 96), (1, 96)])
        assert case.keys_read(threads)[0] == 2 * (2 * CHUNK + 2 * CHUNK + 4 * (2000 - 3 * CHUNK))

    def test_drafts_share_a_prefix_as_well(self, threads: int) -> None:
        case = batch_of([1100] * 2, [(0, 64)] * 2, query_lens=[5, 3])
        assert case.keys_read(threads)[0] == 2 * (2 * CHUNK + 2 * (1100 - 2 * CHUNK))

    def test_less_than_a_chunk_is_not_shared(self, threads: int) -> None:
        shared, separate = batch_of([700] * 4, [(0, 31)] * 4).keys_read(threads)
        assert shared == separate == 2 * 4 * 700

    def test_a_window_leaves_each_its_own(self, threads: int) -> None:
        case = batch_of([1100] * 2, [(0, 64)] * 2, spec=replace(LLAMA, sliding_window=600))
        assert case.keys_read(threads) == (2 * 2 * 600, 2 * 2 * 600)

    def test_a_prefill_reads_its_keys_for_many_rows_already(self, threads: int) -> None:
        case = batch_of([1100] * 2, [(0, 64)] * 2, query_lens=[1, 7])
        shared, separate = case.keys_read(threads)
        assert shared == separate

    def test_many_long_requests_would_take_too_much_memory_for_partial_results(self, threads: int) -> None:
        """More than 64 MB; so each reads all of its keys."""
        spec = LayerSpec(num_heads=96, num_kv_heads=8, key_head_size=8, value_head_size=128, scaling=1.0)
        backend, length = CpuAttention(), 4096
        cache = backend.new_cache(1, 16, spec, torch.float32, torch.device("cpu"))

        def keys_read(requests: int) -> int:
            table = torch.arange(requests * length // 16, dtype=torch.int32).view(requests, -1)
            table[:, : CHUNK // 16] = table[0, : CHUNK // 16]
            lens = [length] * requests
            return backend.keys_read(cache, backend.prepare(metadata_of(lens, [1] * requests, table, 16)), threads)

        assert keys_read(100) < 8 * 100 * length
        assert keys_read(200) == 8 * 200 * length
