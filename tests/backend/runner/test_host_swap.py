"""Swap on a real device: blocks survive the round trip to the host, whatever the cache's layout."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from checkpoints import VOCAB, make_checkpoint
from offline import make_core, run, tokens

from inflight.attention.base import KVCache, LayerSpec
from inflight.device import host_cache as swap
from inflight.device.host_cache import HostCache, StagedHostCache, host_cache_of
from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.cpu import library
from inflight.kernels.registry import select_attention
from inflight.loading.loader import LoadError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    return make_checkpoint("llama", tmp_path_factory.mktemp("swap"))


needs_kernel = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=needs_kernel)])
@pytest.mark.parametrize("kv_cache_dtype", [None, torch.int8])
@pytest.mark.parametrize("block_size", [3, 16])
def test_blocks_are_restored_exactly(backend, kv_cache_dtype, block_size):
    spec = LayerSpec(4, 2, 16, 8, 0.25, kv_cache_dtype=kv_cache_dtype)
    kernel = select_attention(backend, [spec], torch.bfloat16, block_size, torch.device("cpu"))
    caches = [kernel.new_cache(6, block_size, spec, torch.bfloat16, torch.device("cpu")) for _ in range(2)]
    pools = [pool for cache in caches for pool in (cache.key, cache.value)]
    for number, pool in enumerate(pools):
        assert len(pool) == 6
        for block in range(6):
            pool[block].fill_(10 * number + block)
    host = HostCache(caches, 4)
    host.swap_out({3: 0, 1: 5})
    for pool in pools:
        pool[0].fill_(99)
        pool[5].fill_(99)
    host.swap_in({2: 3, 4: 1})
    for number, pool in enumerate(pools):
        assert [float(pool[block].float().mean()) for block in (2, 4)] == [10 * number + 0, 10 * number + 5]
        assert float(pool[1].float().mean()) == 10 * number + 1, "other blocks are unchanged"


class FakeCudart:
    """Which host memory is pinned."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address not in self.pinned, "registered twice"
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def cudart(monkeypatch):
    fake = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    return fake


def random_caches(num_blocks, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_blocks, 2, 3, 4), (num_blocks, 2, 3, 6)]
    return [KVCache(*(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("staged_blocks", [1, 3, 64])
def test_staged_copies_move_the_same_blocks(cudart, monkeypatch, dtype, staged_blocks):
    """Against the plain copies: host blocks scattered and in runs, in several parts, blocks in any order."""
    monkeypatch.setattr(swap, "_STAGED_BLOCKS", staged_blocks)
    rng = random.Random(2)
    results = []
    for kind in (HostCache, StagedHostCache):
        caches = random_caches(40, dtype)
        host = kind(caches, 50)
        rng.seed(2)
        for _ in range(10):
            count = rng.randrange(1, 15)
            host_blocks = rng.sample(range(50), count) if rng.random() < 0.5 else range(30, 30 + count)
            out = dict(zip(host_blocks, rng.sample(range(40), count)))
            host.swap_out(out)
            for cache in caches:
                for block in out.values():
                    cache.key[block] = cache.value[block] = 0
            host.swap_in(dict(zip(rng.sample(range(40), count), rng.sample(list(out), count))))
        results.append([pool.float() for cache in caches for pool in (cache.key, cache.value)])
    assert all(map(torch.equal, *results))
    assert not any(
        map(torch.equal, results[1], [p.float() for c in random_caches(40, dtype) for p in (c.key, c.value)])
    )


def test_a_run_of_host_blocks_is_one_copy_and_none_of_them_waits(cudart, monkeypatch):
    host = StagedHostCache(random_caches(40), 50)
    copies = []
    copy = torch.Tensor.copy_

    def recorded(self, source, non_blocking=False):
        copies.append((len(source), non_blocking))
        return copy(self, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", recorded)
    runs = {7: 0, 8: 30, 9: 2, 20: 3, 5: 1}
    host.swap_out(runs)
    assert copies == [(1, True), (3, True), (1, True)] * 4
    copies.clear()
    host.swap_in({block: host_block for host_block, block in runs.items()})
    assert copies == [(1, True), (3, True), (1, True)] * 4


def test_all_host_memory_is_pinned_to_the_byte_until_it_is_freed(cudart):
    host = StagedHostCache(random_caches(4), 50)
    assert sorted(cudart.pinned.values()) == sorted([50 * 24 * 4, 50 * 36 * 4] * 2)
    del host
    assert not cudart.pinned


def test_only_a_gpu_stages():
    assert type(host_cache_of(random_caches(4), 5)) is HostCache


def test_fp8_blocks_are_restored_exactly():
    cache = KVCache(*(torch.zeros(3, 2, 4, 8, dtype=torch.float8_e4m3fn) for _ in range(2)))
    cache.key[1] = 0.375
    host = HostCache([cache], 1)
    host.swap_out({0: 1})
    host.swap_in({2: 0})
    assert cache.key[2].float().unique().tolist() == [0.375]
    assert cache.value[2].float().unique().tolist() == [0.0]


def test_measuring_copies_changes_nothing(monkeypatch):
    spec = LayerSpec(4, 2, 16, 8, 0.25)
    kernel = select_attention("reference", [spec], torch.float32, 4, torch.device("cpu"))
    cache = kernel.new_cache(6, 4, spec, torch.float32, torch.device("cpu"))
    cache.key.normal_()
    cache.value.normal_()
    before = cache.key.clone()
    clock = iter([0.0, 8.0, 10.0, 12.0, 20.0, 29.0])  # before and after each round
    monkeypatch.setattr(swap, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert HostCache([cache], 4).seconds_per_block() == 0.5, "of the best round, which copied four"
    assert torch.equal(cache.key, before)


def test_swap_and_recompute_give_the_same_output(checkpoint, monkeypatch):
    """Seeded sampling, logprobs and prompt logprobs in float32, with a pool for a quarter of the requests."""
    # However busy the machine is while the copies are measured: they are cheaper than a forward pass.
    monkeypatch.setattr(HostCache, "seconds_per_block", lambda cache: 1e-6)
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(5, 60))] for _ in range(12)]
    params = [
        SamplingParams(
            temperature=float(index % 2),
            seed=index,
            max_tokens=40,
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=0 if index % 3 == 0 else None,
        )
        for index in range(12)
    ]
    outputs = {}
    for mode in ("swap", "recompute", "auto"):
        core = make_core(
            checkpoint,
            block_size=4,
            num_gpu_blocks_override=70,
            max_num_batched_tokens=64,
            swap_space="1MiB",
            preemption_mode=mode,
            async_scheduling=mode == "swap",
        )
        deltas = run(core, prompts, params)
        assert core.scheduler.num_preempted_total >= 5
        assert (core.scheduler.swap.num_swapped_in > 0) is (mode != "recompute")
        outputs[mode] = [tokens(deltas[index, 0]) for index in range(12)]
        entries = [[entry for delta in deltas[i, 0] for entry in delta.prompt_logprobs or ()] for i in range(0, 12, 3)]
        assert [len(entry) for entry in entries] == [len(prompt) for prompt in prompts[::3]]
    assert outputs["swap"] == outputs["recompute"] == outputs["auto"]
    roomy = run(make_core(checkpoint), prompts, params)
    assert outputs["swap"] == [tokens(roomy[index, 0]) for index in range(12)]


def test_impossible_swap_space_is_rejected(checkpoint):
    with pytest.raises(
        LoadError, match=r"swap_space=1000000.*of host memory, but only .* free besides the KV pool; lower it"
    ):
        make_core(checkpoint, swap_space=1000000)
    with pytest.raises(LoadError, match="swap_space='1K' is smaller than a KV block of"):
        make_core(checkpoint, swap_space="1K")


def test_no_host_memory_is_allocated_if_nothing_can_be_swapped(checkpoint):
    assert make_core(checkpoint, swap_space="1MiB", preemption_mode="recompute").runner.host_cache is None
    assert make_core(checkpoint).runner.host_cache is None
