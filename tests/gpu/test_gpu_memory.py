"""Memory on a GPU: the plan holds under load, and swapped blocks come back; skipped without one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("transformers")
pytest.importorskip("msgspec")

from card_sizes import sized
from checkpoints import make_checkpoint
from offline import make_core, run

from inflight.attention.base import KVCache
from inflight.device.host_cache import StagedHostCache, host_cache_of
from inflight.engine.sampling_params import SamplingParams


def test_swapped_blocks_come_back() -> None:
    caches = [KVCache(*(torch.randn(300, 16, 2, sized(64, 8), device="cuda") for _ in range(2))) for _ in range(3)]
    pools = [pool for cache in caches for pool in (cache.key, cache.value)]
    before = [pool.clone() for pool in pools]
    host = host_cache_of(caches, 200)
    assert isinstance(host, StagedHostCache)
    assert all(tensor.is_pinned() for tensor in host._host)
    order = np.random.default_rng(0).permutation(200).tolist()
    host.swap_out(dict(zip(order, range(200))))
    for pool in pools:
        pool[:200] = 0
    host.swap_in(dict(zip(range(200), order)))
    assert all(map(torch.equal, pools, before))
    assert 0 < host.seconds_per_block() < 0.1


@pytest.mark.usefixtures("any_kernels")
@pytest.mark.xdist_group("memory of the GPU")
def test_no_load_takes_more_than_the_utilization(tmp_path: Path) -> None:
    vocab_size, count = sized((32000, 300), (500, 9))
    path = make_checkpoint("llama", tmp_path, head_dim=64, vocab_size=vocab_size)
    limits = dict(max_num_seqs=sized(256, 8), max_num_batched_tokens=sized(8192, 64))
    core = make_core(path, device="cuda", kv_cache_memory=None, gpu_memory_utilization=0.5, **limits)
    torch.cuda.reset_peak_memory_stats()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab_size, sized(100, 20)).tolist() for _ in range(count)]
    params = [
        SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=5, prompt_logprobs=5,
                       max_tokens=sized(10, 4), ignore_eos=True, seed=index)
        for index in range(count)
    ]  # fmt: skip
    run(core, prompts, params)
    # The allocator's own figure: other processes can use the card at the same time.
    assert torch.cuda.max_memory_reserved() <= 0.5 * torch.cuda.mem_get_info()[1]
