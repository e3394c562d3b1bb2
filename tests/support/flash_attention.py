"""FlashAttention's functions as they are documented, in torch and with their checks: for tests without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inflight.attention.base import LayerSpec
from inflight.attention.reference import attend_request

__all__ = ["flash_attn_with_kvcache", "varlen_attn_2_11", "varlen_attn_2_12"]

_DTYPES = (torch.float16, torch.bfloat16)


def varlen_attn_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """`torch.nn.attention.varlen.varlen_attn` of torch 2.11, for whole prompts only."""
    assert window_size == (-1, 0) and scale is not None and max_q == max_k
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and torch.equal(cu_seq_q, cu_seq_k)
    assert query.dtype in _DTYPES and query.dtype == key.dtype == value.dtype
    assert len(query) == len(key) == len(value) == cu_seq_q[-1]
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    heads, kv_heads, size = query.shape[1], key.shape[1], query.shape[2]
    lengths = cu_seq_q.diff().tolist()
    assert max(lengths) <= max_q
    layer = LayerSpec(heads, kv_heads, size, size, scale)
    parts = zip(*(x.split(lengths) for x in (query, key, value)))
    return torch.cat([attend_request(q, k, v, layer, None) for q, k, v in parts])


def varlen_attn_2_12(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: Any = None, block_table: Any = None, num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    """That of torch 2.12 and later, which wants to be told that heads share keys."""
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    assert cu_seq_k is not None
    options: Any = {"scale": scale, "window_size": window_size}
    return varlen_attn_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """FlashAttention-3's, with the checks of hopper/flash_api.cpp.

    Keys behind a request's end are masked, but values there are multiplied by zero.
    """
    requests, (pages, page_size, kv_heads, size) = len(cache_seqlens), k_cache.shape
    assert q.dtype in _DTYPES and q.dtype == k_cache.dtype == v_cache.dtype
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == page_table.stride(-1) == 1
    assert cache_seqlens.is_contiguous() and cu_seqlens_q.is_contiguous()
    assert {t.dtype for t in (cache_seqlens, page_table, cu_seqlens_q)} == {torch.int32}
    assert q.ndim == 3 and v_cache.shape[:3] == (pages, page_size, kv_heads) and q.shape[1] % kv_heads == 0
    assert page_table.shape[0] == requests and cu_seqlens_q.shape == (requests + 1,)
    query_lens = cu_seqlens_q.diff().tolist()
    assert max(query_lens) <= max_seqlen_q and causal
    window = None if window_size[0] < 0 else window_size[0] + 1
    layer = LayerSpec(q.shape[1], kv_heads, size, size, softmax_scale, window, softcap or None)
    out = torch.full_like(q, torch.nan)
    for row, (start, count) in enumerate(zip(cu_seqlens_q.tolist(), query_lens)):
        length = int(cache_seqlens[row])
        blocks = page_table[row, : -(-length // page_size)].long()
        key, value = (cache[blocks].flatten(0, 1) for cache in (k_cache, v_cache))
        behind = (value[length:] * 0).sum()  # NaN if any is NaN
        first = max(0, length - count + 1 - (window or length))
        part = attend_request(q[start : start + count], key[first:length], value[first:length], layer, None)
        out[start : start + count] = part + behind
    return out
