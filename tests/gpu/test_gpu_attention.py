"""The GPU attention kernels, compiled and run on a GPU; skipped without one."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from attention_cases import CASES, FP8, case_of, compile_ahead, spec, stored
from card_sizes import sized
from paged_case import PagedCase, relative_error

from inflight.attention.reference import ReferenceAttention
from inflight.kernels.gpu import gpu_attention, gpu_attention_kernel, gpu_attention_plan, gpu_kv_write
from inflight.kernels.gpu.gpu_attention import GpuAttention
from inflight.kernels.gpu.gpu_attention_configs import Card
from inflight.kernels.gpu.gpu_flash3 import Flash3Attention
from inflight.kernels.registry import select_attention

CUDA = torch.device("cuda")
# tests/backend/kernels/test_gpu_attention.py has float16 in the interpreter.
DTYPES = sized([torch.float32, torch.bfloat16, torch.float16], [torch.float32, torch.bfloat16])


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_ahead([(layer, dtype, size, None) for layer, _, _, size in CASES.values() for dtype in DTYPES])


def exact(case: PagedCase) -> torch.Tensor:
    return case.with_dtype(torch.float32).on("cpu").run(ReferenceAttention())


def allowed(dtype: torch.dtype) -> float:
    return 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name: str, dtype: torch.dtype) -> None:
    case = case_of(name, dtype, device="cuda", seed=random.randrange(2**16))
    out = case.run(GpuAttention())
    assert out.dtype == dtype
    assert relative_error(out.cpu(), exact(case)) < allowed(dtype)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [4, 1, 2], [1, *sized([700, 64], [70, 6])]], ids=str)
def test_long_contexts_and_every_block_size(query_lens: list[int], block_size: int) -> None:
    """Split keys, tiles that span blocks and blocks that span tiles."""
    layer, seq_lens = spec(sized(32, 8), sized(8, 2), 128), sized([5000, 1200, 3000], [500, 120, 300])
    case = PagedCase(layer, seq_lens, query_lens, block_size, torch.bfloat16, device="cuda")
    assert relative_error(case.run(GpuAttention()).cpu(), exact(case)) < allowed(torch.bfloat16)


@pytest.mark.parametrize("layout", ["heads first", "fused", "size strided", "contiguous"])
def test_layouts(layout: str) -> None:
    case = PagedCase(spec(8, 2, 64), [100, 90], [1, 33], 16, torch.bfloat16, layout, device="cuda")
    assert relative_error(case.run(GpuAttention()).cpu(), exact(case)) < allowed(torch.bfloat16)


@pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="this card has no fp8")
@pytest.mark.parametrize("name", ["decode", "mix", "all features"])
def test_fp8_pool(name: str) -> None:
    """The result equals attention to the pool's contents, which are rounded to e4m3's three bits of mantissa."""
    case = case_of(name, torch.bfloat16, device="cuda")
    case = replace(case, spec=replace(case.spec, kv_cache_dtype=FP8))
    backend = GpuAttention()
    cache = case.filled_cache(backend)
    kept = stored(case, cache)
    for rounded, actual in zip(kept.keys + kept.values, case.keys + case.values):
        assert relative_error(rounded, actual) < 0.04
    assert relative_error(case.attend(backend, cache).cpu(), exact(kept)) < 2 * allowed(torch.bfloat16)


def test_write_touches_the_mapped_slots_only() -> None:
    case = PagedCase(spec(4, 2, 64), [400], [1], 16, torch.bfloat16, device="cuda")
    backend = GpuAttention()
    cache = case.filled_cache(backend)
    before = [cache.key.clone(), cache.value.clone()]
    metadata = case.metadata([400])
    metadata.slot_mapping[::2] = -1
    skipped = torch.full_like(case.keys[0], 7.0)
    skipped[1::2], values = case.keys[0][1::2], case.values[0].clone()
    values[::2] = 7.0
    backend.write(skipped, values, cache, backend.prepare(metadata))
    for pool, was in zip((cache.key, cache.value), before):
        assert torch.equal(pool.view(torch.int16), was.view(torch.int16))


def test_nothing_is_compiled_after_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated card counts what a GPU would compile, but the interpreter needs no launches at load."""
    monkeypatch.setattr(gpu_attention, "interpreted", lambda: False)
    layer = spec(sized(32, 4), sized(8, 2), 64)
    backend = GpuAttention()
    cache = backend.new_cache(sized(2000, 100), 16, layer, torch.bfloat16, CUDA)
    kernels = (
        gpu_attention_plan.plan_kernel,
        gpu_attention_kernel.attend_kernel,
        gpu_attention_kernel.reduce_kernel,
        gpu_kv_write.write_kernel,
    )

    def compiled() -> list[int]:
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]

    at_load = compiled()
    for seq_lens, query_lens in (
        ([1], [1]),
        (sized([300], [30]) * 7, [1] * 7),
        (sized([9000], [200]), [1]),
        (sized([900, 17], [90, 17]), [30, 2]),
        ([33] * 2, [33, 1]),
    ):
        for layout in ("heads first", "fused", "contiguous"):
            case = PagedCase(layer, seq_lens, query_lens, 16, torch.bfloat16, layout, device="cuda")
            metadata = case.metadata(query_lens)
            last = [key[-count:] for key, count in zip(case.keys, query_lens)]
            batch = backend.prepare(metadata)
            backend.write(torch.cat(last), torch.cat(last), cache, batch)
            backend.attend(case.query, cache, batch, layer, None)
    assert compiled() == at_load


def test_one_long_context_among_short_ones() -> None:
    """Split into many parts, while the others are not."""
    count, short, long, num_sms = sized((100, 900, 60000, None), (5, 40, 2000, 8))
    lengths = [short] * count
    lengths[37 % count] = long
    case = PagedCase(spec(4, 1, 128), lengths, [1] * count, 16, torch.bfloat16, device="cuda")
    backend = GpuAttention(None if num_sms is None else Card((9, 0), num_sms, 227 * 1024))
    assert relative_error(case.run(backend).cpu(), exact(case)) < allowed(torch.bfloat16)
    (work,) = case.prepared(backend).work.values()
    num_items, num_joins = work.plan[:2].tolist()
    assert num_joins == 1 and num_items >= count + sized(32, 7)


@pytest.mark.parametrize("num_sms", [None, 1], ids=["split", "never split"])
def test_a_captured_step_serves_other_batches(num_sms: int | None) -> None:
    """Captured with `prepare`, all rows used; replayed with one long context, shorter ones and empty rows."""
    layer, rows, longest = spec(8, 2, 128), 6, sized(3000, 150)
    full = PagedCase(layer, [longest] * rows, [1] * rows, 16, torch.bfloat16, device="cuda")
    backend = GpuAttention(None if num_sms is None else Card((9, 0), num_sms, 227 * 1024))
    cache = full.filled_cache(backend)
    metadata, query = full.metadata(full.query_lens), full.query.clone()
    metadata.query_start_loc_cpu, metadata.seq_lens_cpu, metadata.max_seq_len = [], [], -1
    backend.attend(query, cache, backend.prepare(metadata), layer, None)  # as an engine before it captures
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attend(query, cache, backend.prepare(metadata), layer, None)
    for lengths in ([longest] * rows, [20, longest - 9, 1, 1, longest // 4, 0], [0, 0, 0, 0, 0, 5], [17] * rows):
        case = PagedCase(
            layer, [n or 1 for n in lengths], [min(n, 1) for n in lengths], 16, torch.bfloat16, device="cuda", seed=1
        )
        filled, now = case.filled_cache(backend), case.metadata(case.query_lens, lengths)
        for pool, contents in ((cache.key, filled.key), (cache.value, filled.value)):
            pool.fill_(torch.nan)
            pool[: len(contents)] = contents
        metadata.seq_lens.copy_(now.seq_lens)
        metadata.query_start_loc.copy_(now.query_start_loc)
        metadata.block_table[:, : now.block_table.shape[1]] = now.block_table
        query[: len(case.query)] = case.query
        out.fill_(torch.nan)
        graph.replay()
        assert relative_error(out[: len(case.query)].cpu(), exact(case)) < allowed(torch.bfloat16)
        assert out[len(case.query) :].isnan().all()


def test_auto_selects_it() -> None:
    assert select_attention("auto", [spec(8, 2, 64)], torch.bfloat16, 16, CUDA).name == "gpu"


def test_the_engine_uses_it_and_output_equals_generate(tmp_path: Path) -> None:
    from checkpoints import VOCAB, greedy_reference, make_checkpoint
    from offline import make_core, run, tokens

    from inflight.engine.sampling_params import SamplingParams
    from inflight.runner.device_runner import DeviceRunner

    path = make_checkpoint("gemma2", tmp_path)
    prompts = [[random.randrange(VOCAB) for _ in range(length)] for length in sized((1, 37, 20, 90), (1, 37))]
    limits = dict(max_num_batched_tokens=sized(40, 30), max_num_seqs=sized(3, 2), enforce_eager=sized(False, True))
    core = make_core(path, device="cuda", **limits)
    assert isinstance(core.runner, DeviceRunner)
    assert core.runner.info.attention_backend == "gpu"
    counts = [sized(20, 5)] * len(prompts)
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in counts]
    deltas = run(core, prompts, params, stagger=2)
    assert [tokens(deltas[i, 0]) for i in range(len(prompts))] == greedy_reference(path, prompts, counts)


@pytest.mark.parametrize("name", ["decode", "prompts", "mix", "window", "softcap", "blocks as tiles"])
def test_flash3_agrees_if_it_is_installed(name: str) -> None:
    case, backend = case_of(name, torch.bfloat16, device="cuda"), Flash3Attention()
    if (reason := backend.unsupported(case.spec, case.dtype, case.block_size)) is not None:
        pytest.skip(reason)
    cache = case.filled_cache(backend)
    cache.key.nan_to_num_()
    cache.value.nan_to_num_()
    assert relative_error(case.attend(backend, cache).cpu(), exact(case)) < 2 * allowed(torch.bfloat16)
