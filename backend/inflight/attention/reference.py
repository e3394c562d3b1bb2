"""Readable attention in plain torch: gather a request's blocks, then call SDPA.

Supports every feature but fp8 pools, on every device.  The other kernels are tested against it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.attention import int8_kv as int8
from inflight.attention.base import AttentionMetadata, KVCache, LayerSpec
from inflight.attention.dtypes import unsupported_kv_dtype

__all__ = ["ReferenceAttention", "attend_request"]


class ReferenceAttention:
    """Implements `AttentionBackend`, one request at a time."""

    name = "reference"
    capturable = False

    def unsupported(self, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> str | None:
        return unsupported_kv_dtype(spec.kv_cache_dtype, "auto", "int8")

    def new_cache(
        self, num_blocks: int, block_size: int, spec: LayerSpec, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        stored = spec.kv_cache_dtype or dtype
        scale = int8.SCALE_BYTES if stored == torch.int8 else 0
        shape = (num_blocks, block_size, spec.num_kv_heads)
        return KVCache(
            torch.empty(*shape, spec.key_head_size + scale, dtype=stored, device=device),
            torch.empty(*shape, spec.value_head_size + scale, dtype=stored, device=device),
        )

    def prepare(self, metadata: AttentionMetadata) -> AttentionMetadata:
        return metadata

    def write(self, key: Tensor, value: Tensor, cache: KVCache, batch: AttentionMetadata) -> None:
        if cache.key.dtype == torch.int8:
            key, value = int8.pack(key), int8.pack(value)
        cache.key.flatten(0, 1).index_copy_(0, batch.slot_mapping, key)
        cache.value.flatten(0, 1).index_copy_(0, batch.slot_mapping, value)

    def attend(
        self, query: Tensor, cache: KVCache, batch: AttentionMetadata, spec: LayerSpec, sinks: Tensor | None
    ) -> Tensor:
        out = query.new_empty(query.shape[0], spec.num_heads, spec.value_head_size)
        block_size = batch.block_size
        for row, seq_len in enumerate(batch.seq_lens_cpu):
            start, end = batch.query_start_loc_cpu[row], batch.query_start_loc_cpu[row + 1]
            first = 0  # first position that any of the request's queries attends to
            if spec.sliding_window is not None:
                first = max(0, seq_len - (end - start) + 1 - spec.sliding_window)
            first_block = first // block_size
            blocks = batch.block_table[row, first_block : -(-seq_len // block_size)]
            skip = first - first_block * block_size
            visible = slice(skip, skip + seq_len - first)
            key = cache.key[blocks].flatten(0, 1)[visible]
            value = cache.value[blocks].flatten(0, 1)[visible]
            if key.dtype == torch.int8:
                key, value = int8.unpack(key, query.dtype), int8.unpack(value, query.dtype)
            out[start:end] = attend_request(query[start:end], key, value, spec, sinks)
        return out


def attend_request(query: Tensor, key: Tensor, value: Tensor, spec: LayerSpec, sinks: Tensor | None) -> Tensor:
    """Causal attention of a request's last n positions over its keys and values.

    query [n, Hq, Dk], key [S, Hkv, Dk], value [S, Hkv, Dv] -> [n, Hq, Dv].
    """
    n, s = query.shape[0], key.shape[0]
    group = spec.num_heads // spec.num_kv_heads
    key, value = key.transpose(0, 1), value.transpose(0, 1)  # [Hkv, S, D]
    if spec.softcap is not None or sinks is not None:
        return _attend_explicitly(query, key, value, spec, sinks)
    if n == 1:
        # A single query attends to all keys, so the query heads of a KV head can take the place of queries.
        grouped = query.reshape(1, spec.num_kv_heads, group, spec.key_head_size)
        out = F.scaled_dot_product_attention(grouped, key[None], value[None], scale=spec.scaling)
        return out.reshape(1, spec.num_heads, spec.value_head_size)
    plain = n == s and spec.sliding_window is None
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key[None],
        value[None],
        attn_mask=None if plain else _mask(n, s, spec.sliding_window, query.device),
        is_causal=plain,
        scale=spec.scaling,
        enable_gqa=group > 1,
    )
    return out[0].transpose(0, 1)


def _attend_explicitly(query: Tensor, key: Tensor, value: Tensor, spec: LayerSpec, sinks: Tensor | None) -> Tensor:
    """The same in float32 with softcap and sinks, which SDPA lacks; key, value [Hkv, S, D]."""
    n, s = query.shape[0], key.shape[1]
    group = spec.num_heads // spec.num_kv_heads
    q = query.transpose(0, 1).float().reshape(spec.num_kv_heads, group * n, spec.key_head_size)
    scores = (q @ key.float().transpose(1, 2) * spec.scaling).reshape(spec.num_heads, n, s)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~_mask(n, s, spec.sliding_window, query.device), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, n, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :s].reshape(spec.num_kv_heads, group * n, s)
    out = (weights @ value.float()).reshape(spec.num_heads, n, spec.value_head_size)
    return out.transpose(0, 1).to(query.dtype)


def _mask(n: int, s: int, window: int | None, device: torch.device) -> Tensor:
    """bool [n, s]: whether the query at position s - n + i attends to key j."""
    distance = torch.arange(s - n, s, device=device)[:, None] - torch.arange(s, device=device)[None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)
