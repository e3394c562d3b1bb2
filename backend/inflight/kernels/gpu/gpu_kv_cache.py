"""The paged KV pool on a GPU: allocation, fp8 scales, and writes through `gpu_kv_write.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.attention.base import AttentionMetadata, KVCache, LayerSpec
from inflight.kernels.gpu.gpu_attention_configs import padded

__all__ = ["GpuKVCache", "aligned", "new_cache", "one_request", "strides", "warm_up_write", "write"]

_BLOCK_T = 16  # tokens per program of the write kernel


@dataclass(slots=True)
class GpuKVCache(KVCache):
    """`key` and `value` are [num_blocks, num_kv_heads, block_size, size]."""


def new_cache(
    num_blocks: int, block_size: int, spec: LayerSpec, dtype: torch.dtype, device: torch.device
) -> GpuKVCache:
    """See `AttentionBackend.new_cache`; the scales of an fp8 cache are 1."""
    stored = spec.kv_cache_dtype or dtype
    shape = (num_blocks, spec.num_kv_heads, block_size)
    has_scales = spec.kv_cache_dtype is not None
    key_scale, value_scale = (torch.ones(spec.num_kv_heads, device=device) if has_scales else None for _ in range(2))
    return GpuKVCache(
        torch.empty(*shape, spec.key_head_size, dtype=stored, device=device),
        torch.empty(*shape, spec.value_head_size, dtype=stored, device=device),
        key_scale=key_scale,
        value_scale=value_scale,
    )


def write(key: Tensor, value: Tensor, cache: GpuKVCache, metadata: AttentionMetadata) -> None:
    """See `AttentionBackend.write`.  In an fp8 cache, numbers above 448 scales saturate."""
    from inflight.kernels.gpu.gpu_kv_write import write_kernel  # needs the triton package

    key, value = aligned(key), aligned(value)
    num_tokens, num_kv_heads, key_size = key.shape
    value_size = value.shape[2]
    write_kernel[(-(-num_tokens // _BLOCK_T), num_kv_heads)](
        key,
        value,
        cache.key,
        cache.value,
        cache.key_scale,
        cache.value_scale,
        metadata.slot_mapping,
        num_tokens,
        *strides(key),
        *strides(value),
        NUM_KV_HEADS=num_kv_heads,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        KEY_PADDED=padded(key_size),
        VALUE_PADDED=padded(value_size),
        BLOCK_SIZE=metadata.block_size,
        HAS_SCALES=cache.key_scale is not None,
        BLOCK_T=_BLOCK_T,
    )


def warm_up_write(cache: GpuKVCache, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> None:
    """Compile the kernel that `write` launches for this kind of layer; changes nothing in the cache."""
    key, value = (
        torch.zeros(1, spec.num_kv_heads, size, dtype=dtype, device=cache.key.device)
        for size in (spec.key_head_size, spec.value_head_size)
    )
    write(key, value, cache, one_request(1, block_size, cache.key.device))


def one_request(count: int, block_size: int, device: torch.device) -> AttentionMetadata:
    """A prompt of `count` tokens, all in block 0; none of them is written."""
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
        block_table=torch.zeros(1, -(-count // block_size), dtype=torch.int32, device=device),
        slot_mapping=torch.full((count,), -1, dtype=torch.int64, device=device),
        query_start_loc_cpu=[0, count],
        seq_lens_cpu=[count],
        max_query_len=count,
        max_seq_len=count,
        block_size=block_size,
    )


def aligned(x: Tensor) -> Tensor:
    """x [T, heads, size] with contiguous elements and 16-byte rows: kernels are compiled for those only."""
    if x.shape[2] % 16 == 0 and x.stride(2) == 1 and not (x.data_ptr() | x.stride(0) | x.stride(1)) % 16:
        return x
    return x.contiguous()


def strides(x: Tensor) -> tuple[int, int]:
    """Elements from token to token and from head to head; torch leaves them undefined for dimensions of size 1."""
    tokens, heads, size = x.shape
    return x.stride(0) if tokens > 1 else heads * size, x.stride(1) if heads > 1 else size
