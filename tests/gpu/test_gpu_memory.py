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

from checkpoints import make_checkpoint
from offline import make_core, run

from inflight.attention.base import KVCache
from inflight.device.host_cache import StagedHostCache, host_cache_of
from inflight.engine.sampling_params import SamplingParams


def test_swapped_blocks_come_back() -> None:
    caches = [KVCache(*(torch.randn(300, 16, 2, 64, device="cuda") for _ in range(2))) for _ in range(3)]
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


def test_no_load_takes_more_than_the_utilization(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, head_dim=64, vocab_size=32000)
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    core = make_core(path, device="cuda", kv_cache_memory=None, gpu_memory_utilization=0.5, **limits)
    torch.cuda.reset_peak_memory_stats()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 32000, 100).tolist() for _ in range(300)]
    params = [
        SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=5, prompt_logprobs=5,
                       max_tokens=10, ignore_eos=True, seed=index)
        for index in range(300)
    ]  # fmt: skip
    run(core, prompts, params)
    free, total = torch.cuda.mem_get_info()
    peak = total - free - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()
    assert peak <= 0.5 * total
