"""FlashInfer's paged attention behind `AttentionBackend`, for whoever has it installed and asks for it.

The pool and what writes to it are the Triton kernel's: its layout is the one that FlashInfer calls HND.
`BatchPrefillWithPagedKVCacheWrapper` takes decodes, chunks and mixes alike; its `plan` runs once a step
and kind of layer, on the host, so a step cannot be captured in a CUDA graph.

FlashInfer: Ye et al., arXiv:2501.01005; interface: https://docs.flashinfer.ai/api/attention.html
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inflight.attention.base import AttentionMetadata, KVCache, LayerSpec
from inflight.kernels.gpu.gpu_attention import GpuAttention, TritonKVCache

__all__ = ["FlashInferAttention"]

_HEAD_SIZES = (64, 128, 256)
_WORKSPACE_BYTES = 128 * 2**20  # FlashInfer's recommendation


class FlashInferAttention(GpuAttention):
    """Implements `AttentionBackend`; never taken by "auto"."""

    name = "flashinfer"

    def __init__(self) -> None:
        super().__init__()
        self._workspace: Tensor | None = None
        self._wrappers: dict[LayerSpec, Any] = {}
        # The step that the wrappers of `_planned` are planned for, and its pages.
        self._planned: set[LayerSpec] = set()
        self._pages: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def unsupported(self, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> str | None:
        if importlib.util.find_spec("flashinfer") is None:
            return "the flashinfer package (pip install flashinfer-python)"
        if spec.has_sinks:
            return "sinks"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"dtype {str(dtype).removeprefix('torch.')} (it has bfloat16 and float16)"
        if spec.kv_cache_dtype is not None:
            return "kv_cache_dtype other than 'auto'"
        for size in (spec.key_head_size, spec.value_head_size):
            if size not in _HEAD_SIZES or size != spec.key_head_size:
                return f"head size {size} (it has {', '.join(map(str, _HEAD_SIZES))}, keys and values alike)"
        return super().unsupported(spec, dtype, block_size)

    def attend(
        self, query: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: LayerSpec, sinks: Tensor | None
    ) -> Tensor:
        if metadata is not self._step:
            self._step, self._planned, self._pages = metadata, set(), _pages(metadata)
        if spec not in self._planned:
            self._plan(spec, query, metadata.block_size)
        return self._wrappers[spec].run(query.contiguous(), (cache.key, cache.value))

    def _plan(self, spec: LayerSpec, query: Tensor, block_size: int) -> None:
        assert self._pages is not None
        wrapper = self._wrappers.get(spec)
        if wrapper is None:
            if self._workspace is None:
                self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
            module = importlib.import_module("flashinfer")
            wrapper = self._wrappers[spec] = module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        wrapper.plan(
            *self._pages,
            spec.num_heads,
            spec.num_kv_heads,
            spec.key_head_size,
            block_size,
            causal=True,
            sm_scale=spec.scaling,
            window_left=-1 if spec.sliding_window is None else spec.sliding_window - 1,
            logits_soft_cap=spec.softcap,
            q_data_type=query.dtype,
        )
        self._planned.add(spec)

    def _warm_up(self, cache: TritonKVCache, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> None:
        """Nothing but writing is Triton's; FlashInfer compiles or loads its own in the check at load."""
        self._warm_up_write(cache, spec, dtype, block_size)


def _pages(metadata: AttentionMetadata) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """FlashInfer's view of the batch: rows of query and pages per request, page ids, tokens in the last pages.

    int32; [R + 1], [R + 1], [pages], [R].  All but the ids stay on the host, where `plan` wants them.
    """
    lens = np.asarray(metadata.lens)
    counts = -(-lens // metadata.block_size)
    starts = np.concatenate([[0], np.cumsum(counts)])
    rows = np.repeat(np.arange(len(lens)), counts)
    entries = rows * metadata.block_table.shape[1] + np.arange(starts[-1]) - starts[rows]
    ids = metadata.block_table.flatten()[torch.from_numpy(entries).to(metadata.block_table.device)]
    last = lens - np.maximum(counts - 1, 0) * metadata.block_size
    host = [torch.from_numpy(array.astype(np.int32)) for array in (starts, last)]
    return torch.tensor(metadata.query_starts, dtype=torch.int32), host[0], ids, host[1]
