"""FlashAttention-3 for batches with prompts, on Hopper; optional, never selected by "auto".

Everything else is `GpuAttention`'s: decodes, and so all that CUDA graphs capture, and the pool, which
FlashAttention-3 reads through its strides.

FlashAttention-3: Shah et al., arXiv:2407.08608; the call is `flash_attn_with_kvcache` of
https://github.com/Dao-AILab/flash-attention/blob/main/hopper/flash_attn_interface.py.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inflight.attention.base import AttentionMetadata, KVCache, LayerSpec
from inflight.attention.dtypes import unsupported_kv_dtype
from inflight.kernels.gpu.gpu_attention import GpuAttention, GpuBatch
from inflight.kernels.gpu.gpu_kv_cache import GpuKVCache

__all__ = ["Flash3Attention"]

# A build installed with pip, or else the one that the `kernels` package fetches: the version that transformers pins.
_PACKAGE = "flash_attn_interface"
_REPOSITORY, _VERSION = "kernels-community/flash-attn3", 1


class Flash3Attention(GpuAttention):
    """Implements `AttentionBackend`."""

    name = "flash3"

    def unsupported(self, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> str | None:
        if self.card.capability[0] != 9:
            have = ".".join(map(str, self.card.capability))
            return f"compute capability {have} (FlashAttention-3 supports 9.0, Hopper)"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"dtype={str(dtype).removeprefix('torch.')} (supported: bfloat16 and float16)"
        if (reason := unsupported_kv_dtype(spec.kv_cache_dtype, "auto")) is not None:
            return reason
        if spec.has_sinks:
            return "sinks"
        sizes = spec.key_head_size, spec.value_head_size
        if sizes[0] != sizes[1] or sizes[0] % 8:
            return f"head sizes {sizes[0]} and {sizes[1]} (supported: multiples of 8, equal for keys and values)"
        reason = super().unsupported(spec, dtype, block_size)
        return _flash_attention()[1] if reason is None else reason

    def new_cache(
        self, num_blocks: int, block_size: int, spec: LayerSpec, dtype: torch.dtype, device: torch.device
    ) -> GpuKVCache:
        """Zeroed: FlashAttention-3 may multiply what is behind a request's end by zero, which NaN survives."""
        cache = super().new_cache(num_blocks, block_size, spec, dtype, device)
        cache.key.zero_()
        cache.value.zero_()
        return cache

    def prepare(self, metadata: AttentionMetadata) -> GpuBatch:
        kinds = [kind for kind in self._kinds if self._is_decode(kind[0], metadata)]
        return GpuBatch(metadata, {kind: self._plan(*kind, metadata) for kind in kinds})

    def attend(self, query: Tensor, cache: KVCache, batch: GpuBatch, spec: LayerSpec, sinks: Tensor | None) -> Tensor:
        metadata = batch.metadata
        if self._is_decode(spec, metadata) or query.dtype != cache.key.dtype:
            return super().attend(query, cache, batch, spec, sinks)
        call, _ = _flash_attention()
        assert call is not None
        window = (-1, -1) if spec.sliding_window is None else (spec.sliding_window - 1, 0)
        return call(
            query if query.stride(-1) == 1 else query.contiguous(),
            # [blocks, block_size, Hkv, size]: only the last dimension must be contiguous.
            cache.key.transpose(1, 2),
            cache.value.transpose(1, 2),
            cache_seqlens=metadata.seq_lens,
            page_table=metadata.block_table,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            softmax_scale=spec.scaling,
            causal=True,
            window_size=window,
            softcap=spec.softcap or 0.0,
        )


@functools.cache
def _flash_attention() -> tuple[Callable[..., Any] | None, str | None]:
    """`flash_attn_with_kvcache`, or the reason why there is none."""
    try:
        if importlib.util.find_spec(_PACKAGE) is not None:
            module: Any = importlib.import_module(_PACKAGE)
        elif importlib.util.find_spec("kernels") is not None:
            module = importlib.import_module("kernels").get_kernel(_REPOSITORY, version=_VERSION)
        else:
            return None, (
                f"neither {_PACKAGE} nor the kernels package is installed (pip install kernels, which fetches "
                f"{_REPOSITORY}, or build {_PACKAGE} from github.com/Dao-AILab/flash-attention, folder hopper)"
            )
        return module.flash_attn_with_kvcache, None
    except Exception as error:  # of a download, of a library that does not fit this torch
        return None, f"FlashAttention-3 cannot be loaded: {type(error).__name__}: {error}"
