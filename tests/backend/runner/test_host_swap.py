"""Swap on a real device: blocks survive the round trip to the host, whatever the cache's layout."""

from __future__ import annotations

import random

import pytest
import torch
from checkpoints import VOCAB, make_checkpoint
from offline import make_core, run, tokens

from inflight.attention.base import KVCache, LayerSpec
from inflight.attention.selection import select_backend
from inflight.engine.sampling_params import SamplingParams
from inflight.kernels.cpu import library
from inflight.loading.loader import LoadError
from inflight.runner.swap import HostCache


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
    kernel = select_backend(backend, [spec], torch.bfloat16, block_size, torch.device("cpu"))
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


def test_fp8_blocks_are_restored_exactly():
    cache = KVCache(*(torch.zeros(3, 2, 4, 8, dtype=torch.float8_e4m3fn) for _ in range(2)))
    cache.key[1] = 0.375
    host = HostCache([cache], 1)
    host.swap_out({0: 1})
    host.swap_in({2: 0})
    assert cache.key[2].float().unique().tolist() == [0.375]
    assert cache.value[2].float().unique().tolist() == [0.0]


def test_measuring_copies_changes_nothing():
    spec = LayerSpec(4, 2, 16, 8, 0.25)
    kernel = select_backend("reference", [spec], torch.float32, 4, torch.device("cpu"))
    cache = kernel.new_cache(6, 4, spec, torch.float32, torch.device("cpu"))
    cache.key.normal_()
    cache.value.normal_()
    before = cache.key.clone()
    assert 0 < HostCache([cache], 4).seconds_per_block() < 0.1
    assert torch.equal(cache.key, before)


def test_swap_and_recompute_give_the_same_output(checkpoint):
    """Seeded sampling, logprobs and prompt logprobs in float32, with a pool for a quarter of the requests."""
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
        assert (core.swap.num_swapped_in > 0) is (mode != "recompute"), "a copy in RAM is cheaper than a forward pass"
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
