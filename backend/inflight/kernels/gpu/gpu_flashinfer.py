"""FlashInfer's paged attention as an `AttentionBackend`: optional, never selected by "auto".

Uses the same pool as `GpuAttention`, whose layout FlashInfer calls HND.
`BatchPrefillWithPagedKVCacheWrapper` handles decodes, chunks and mixes alike.  Its `plan` runs on the host,
once per step and kind of layer; steps cannot be captured in a CUDA graph.

FlashInfer: Ye et al., arXiv:2501.01005; interface: https://docs.flashinfer.ai/api/attention.html
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inflight.attention.base import AttentionMetadata, KVCache, LayerSpec, unsupported_kv_dtype
from inflight.kernels.gpu import gpu_kv_cache
from inflight.kernels.gpu.gpu_attention import GpuAttention
from inflight.kernels.gpu.gpu_kv_cache import GpuKVCache
from inflight.kernels.gpu.launch import interpreted

__all__ = ["FlashInferAttention"]

_HEAD_SIZES = (64, 128, 256)
_WORKSPACE_BYTES = 128 * 2**20  # as FlashInfer recommends


class FlashInferAttention:
    """Implements `AttentionBackend`."""

    name = "flashinfer"
    capturable = False

    def __init__(self) -> None:
        self._workspace: Tensor | None = None
        self._wrappers: dict[LayerSpec, Any] = {}
        # Kinds of layers: their specs and the dtype of their queries.
        self._kinds: dict[LayerSpec, torch.dtype] = {}

    def unsupported(self, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> str | None:
        if importlib.util.find_spec("flashinfer") is None:
            return "the flashinfer package is missing (pip install flashinfer-python)"
        if spec.has_sinks:
            return "sinks"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"dtype={str(dtype).removeprefix('torch.')} (supported: bfloat16 and float16)"
        if (reason := unsupported_kv_dtype(spec, "auto")) is not None:
            return reason
        for size in (spec.key_head_size, spec.value_head_size):
            if size not in _HEAD_SIZES or size != spec.key_head_size:
                return f"head size {size} (supported: {', '.join(map(str, _HEAD_SIZES))}, equal for keys and values)"
        return GpuAttention().unsupported(spec, dtype, block_size)

    def new_cache(
        self, num_blocks: int, block_size: int, spec: LayerSpec, dtype: torch.dtype, device: torch.device
    ) -> GpuKVCache:
        cache = gpu_kv_cache.new_cache(num_blocks, block_size, spec, dtype, device)
        if spec not in self._kinds:
            self._kinds[spec] = dtype
            if not interpreted():
                gpu_kv_cache.warm_up_write(cache, spec, dtype, block_size)
        return cache

    def prepare(self, metadata: AttentionMetadata) -> AttentionMetadata:
        pages = _pages(metadata)
        for spec, dtype in self._kinds.items():
            self._wrapper(spec, metadata.query_start_loc.device).plan(
                *pages,
                spec.num_heads,
                spec.num_kv_heads,
                spec.key_head_size,
                metadata.block_size,
                causal=True,
                sm_scale=spec.scaling,
                window_left=-1 if spec.sliding_window is None else spec.sliding_window - 1,
                logits_soft_cap=spec.softcap,
                q_data_type=dtype,
            )
        return metadata

    def write(self, key: Tensor, value: Tensor, cache: KVCache, batch: AttentionMetadata) -> None:
        assert isinstance(cache, GpuKVCache)
        gpu_kv_cache.write(key, value, cache, batch)

    def attend(
        self, query: Tensor, cache: KVCache, batch: AttentionMetadata, spec: LayerSpec, sinks: Tensor | None
    ) -> Tensor:
        return self._wrappers[spec].run(query.contiguous(), (cache.key, cache.value))

    def _wrapper(self, spec: LayerSpec, device: torch.device) -> Any:
        """Holds the plan of one kind of layer; all share the workspace, which only `run` uses."""
        if spec not in self._wrappers:
            if self._workspace is None:
                self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            module = importlib.import_module("flashinfer")
            self._wrappers[spec] = module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        return self._wrappers[spec]


def _pages(metadata: AttentionMetadata) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """FlashInfer's form of the batch: rows of query and pages per request, page ids, tokens in the last pages.

    int32; [R + 1], [R + 1], [pages], [R].  All but the ids are on the host, where `plan` reads them.
    """
    seq_lens = np.asarray(metadata.seq_lens_cpu)
    counts = -(-seq_lens // metadata.block_size)
    starts = np.concatenate([[0], np.cumsum(counts)])
    rows = np.repeat(np.arange(len(seq_lens)), counts)
    entries = rows * metadata.block_table.shape[1] + np.arange(starts[-1]) - starts[rows]
    ids = metadata.block_table.flatten()[torch.from_numpy(entries).to(metadata.block_table.device)]
    last = seq_lens - np.maximum(counts - 1, 0) * metadata.block_size
    host = [torch.from_numpy(array.astype(np.int32)) for array in (starts, last)]
    return torch.tensor(metadata.query_start_loc_cpu, dtype=torch.int32), host[0], ids, host[1]
