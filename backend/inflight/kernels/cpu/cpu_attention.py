"""Paged attention on CPUs: `AttentionBackend` by `cpu_attention.cpp`.

Processes ragged mixes of prefill chunks and decodes directly in the pool, on torch's OpenMP threads.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.attention.base import AttentionMetadata, KVCache, LayerSpec
from inflight.attention.dtypes import unsupported_dtype, unsupported_kv_dtype
from inflight.attention.int8_kv import SCALE_BYTES
from inflight.kernels.cpu.library import DTYPE_CODES, allocate, library, unavailable

__all__ = ["MAX_HEAD_SIZE", "CpuAttention", "CpuBatch", "CpuKVCache"]

MAX_HEAD_SIZE = 1024
_GROUP = 16  # slots in a packed panel


class _Layer(ctypes.Structure):
    """`Layer` of cpu_attention.h."""

    _fields_ = [
        ("pool", c_void_p),
        ("block_size", c_int64),
        ("dtype", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("key_size", c_int32),
        ("value_size", c_int32),
        ("sliding_window", c_int32),
        ("scaling", c_float),
        ("softcap", c_float),
        ("both_ways", c_int32),
    ]


class _Batch(ctypes.Structure):
    """`Batch` of cpu_attention.h."""

    _fields_ = [
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("slot_mapping", c_void_p),
        ("block_table_stride", c_int64),
        ("num_requests", c_int64),
        ("num_tokens", c_int64),
    ]


@dataclass(slots=True)
class CpuKVCache(KVCache):
    """`key` and `value` are [num_blocks, panels per block, num_kv_heads, elements]: views of one
    allocation, in which they alternate panel by panel (see cpu_attention.h).

    Attributes:
        layer: description of the layer that the kernel reads.
        address: of `layer`.
    """

    layer: _Layer
    address: int


@dataclass(slots=True)
class CpuBatch:
    """A step's batch as the kernels read it.

    Attributes:
        address: of `batch`.
        batch: holds the addresses of `tensors`.
    """

    address: int
    batch: _Batch
    tensors: tuple[Tensor, ...]


class CpuAttention:
    """Implements `AttentionBackend`."""

    name = "cpu"
    capturable = False

    def unsupported(self, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> str | None:
        if (
            reason := unsupported_kv_dtype(spec.kv_cache_dtype, "auto", "int8") or unsupported_dtype(dtype)
        ) is not None:
            return reason
        for size in (spec.key_head_size, spec.value_head_size):
            if size % 8 or size > MAX_HEAD_SIZE:
                return f"head size {size} (supported: multiples of 8 up to {MAX_HEAD_SIZE})"
        if not spec.scaling > 0:
            return f"scaling={spec.scaling} (must be positive)"
        return unavailable()

    def new_cache(
        self, num_blocks: int, block_size: int, spec: LayerSpec, dtype: torch.dtype, device: torch.device
    ) -> CpuKVCache:
        panel_slots = _GROUP if block_size % _GROUP == 0 else 1
        stored = spec.kv_cache_dtype or dtype
        scales = 2 * SCALE_BYTES if stored == torch.int8 else 0  # per slot, in front of the keys
        key_elements = panel_slots * (spec.key_head_size + scales)
        elements = key_elements + panel_slots * spec.value_head_size
        pool = allocate(num_blocks, block_size // panel_slots, spec.num_kv_heads, elements, dtype=stored)
        layer = _Layer(
            pool=pool.data_ptr(),
            block_size=block_size,
            dtype=DTYPE_CODES[stored],
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            key_size=spec.key_head_size,
            value_size=spec.value_head_size,
            sliding_window=spec.sliding_window or 0,
            scaling=spec.scaling,
            softcap=spec.softcap or 0.0,
        )
        return CpuKVCache(pool[..., :key_elements], pool[..., key_elements:], layer, ctypes.addressof(layer))

    def prepare(self, metadata: AttentionMetadata) -> CpuBatch:
        query_start_loc, seq_lens = metadata.query_start_loc.contiguous(), metadata.seq_lens.contiguous()
        block_table, slot_mapping = metadata.block_table.contiguous(), metadata.slot_mapping.contiguous()
        batch = _Batch(
            query_start_loc.data_ptr(),
            seq_lens.data_ptr(),
            block_table.data_ptr(),
            slot_mapping.data_ptr(),
            block_table.shape[1],
            len(seq_lens),
            len(slot_mapping),
        )
        return CpuBatch(ctypes.addressof(batch), batch, (query_start_loc, seq_lens, block_table, slot_mapping))

    def write(self, key: Tensor, value: Tensor, cache: KVCache, batch: CpuBatch) -> None:
        assert isinstance(cache, CpuKVCache)
        if key.stride(2) != 1:
            key = key.contiguous()
        if value.stride(2) != 1:
            value = value.contiguous()
        library().inflight_attention_write(
            cache.address,
            batch.address,
            key.data_ptr(),
            key.stride(0),
            key.stride(1),
            value.data_ptr(),
            value.stride(0),
            value.stride(1),
            DTYPE_CODES[key.dtype],
            torch.get_num_threads(),
        )

    def attend(self, query: Tensor, cache: KVCache, batch: CpuBatch, spec: LayerSpec, sinks: Tensor | None) -> Tensor:
        assert isinstance(cache, CpuKVCache)
        if query.stride(2) != 1:
            query = query.contiguous()
        if sinks is not None:
            sinks = sinks.to(torch.float32).contiguous()
        out = query.new_empty(query.shape[0], spec.num_heads, spec.value_head_size)
        library().inflight_attention_attend(
            cache.address,
            batch.address,
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            DTYPE_CODES[query.dtype],
            out.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def keys_read(self, cache: KVCache, batch: CpuBatch, threads: int) -> int:
        """Keys, times KV heads, that `attend` passes over: blocks in common count once a pass.  For tests."""
        assert isinstance(cache, CpuKVCache)
        return library().inflight_attention_keys(cache.address, batch.address, threads)
