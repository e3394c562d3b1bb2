"""Paged attention on NVIDIA GPUs: `AttentionBackend` by `gpu_attention_kernel.py`.

Nothing waits for the device or reads a tensor on the host, not even the copies of lengths in the metadata: grids and
scratch follow from the size of the batch and the card, and a kernel that `prepare` launches decides how keys are
split.  A step captured in a CUDA graph, `prepare` included, can therefore be replayed for other lengths, block tables
and slots in the same tensors, with at most `max_query_len` tokens per request.  Requests without tokens take nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from inflight.attention.base import AttentionMetadata, KVCache, LayerSpec
from inflight.attention.dtypes import unsupported_dtype, unsupported_kv_dtype
from inflight.kernels.gpu import gpu_kv_cache
from inflight.kernels.gpu.gpu_attention_configs import (
    SCRATCH_BYTES,
    Card,
    Geometry,
    Room,
    Tile,
    padded,
    room_for,
    tile_for,
)
from inflight.kernels.gpu.gpu_kv_cache import GpuKVCache
from inflight.kernels.gpu.launch import interpreted, unavailable

__all__ = ["GpuAttention", "GpuBatch"]

_MAX_HEAD_SIZE = 256
_MAX_GROUP = 64
_MIN_FP8_CAPABILITY = (8, 9)
# Of the plan and reduction kernels: requests, and parts of a split block, that they take at a time.
_PLAN_CHUNK = 256
_REDUCE_CHUNK = 32
# Programs of the reduction per KV head, at most: by rows, by split blocks.  Most steps have nothing to reduce.
_REDUCE_GRID = 16, 32
# The card that the interpreter assumes: a small one, because programs that do nothing take time, too.
_INTERPRETED = Card((9, 0), 4, 227 * 1024)


@dataclass(slots=True)
class _Layer:
    """The kernels compiled for one kind of layer, for decodes or for other batches.

    Attributes:
        shapes: constants that the kernels of attention and reduction share.
        attend: constants of attention only.
        running: attention programs that the card runs concurrently.
    """

    spec: LayerSpec
    geometry: Geometry
    shapes: dict[str, Any]
    attend: dict[str, Any]
    running: int


@dataclass(slots=True)
class _Work:
    """The launches of the layers of one kind for a step's batch.

    Attributes:
        plan: int32, on the device, with the room that `room` says; see `gpu_attention_plan.py`.
    """

    layer: _Layer
    room: Room
    plan: Tensor


@dataclass(slots=True)
class GpuBatch:
    """A step's batch.

    Attributes:
        work: for each kind of layer (spec, dtype of queries).
    """

    metadata: AttentionMetadata
    work: dict[tuple[LayerSpec, torch.dtype], _Work]


class GpuAttention:
    """Implements `AttentionBackend`.

    Args:
        card: defaults to the device's; tests and benchmarks name another.
        launch_pdl: launch kernels before the one before them has ended (`gpu_pdl.py`).
    """

    name = "gpu"
    capturable = True

    def __init__(self, card: Card | None = None, launch_pdl: bool = False) -> None:
        self._card = card
        self._launch_pdl = launch_pdl
        self._layers: dict[tuple[LayerSpec, torch.dtype, int, bool], _Layer] = {}
        # Kinds of layers that `prepare` plans for: those of the caches.
        self._kinds: set[tuple[LayerSpec, torch.dtype]] = set()
        self._scratch: tuple[Tensor, Tensor] | None = None

    @property
    def card(self) -> Card:
        if self._card is None:
            self._card = Card.of(torch.device("cuda")) if torch.cuda.is_available() else _INTERPRETED
        return self._card

    def unsupported(self, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> str | None:
        reason = unavailable() or unsupported_dtype(dtype) or unsupported_kv_dtype(spec.kv_cache_dtype, "auto", "fp8")
        if reason is not None:
            return reason
        if spec.kv_cache_dtype is not None and self.card.capability < _MIN_FP8_CAPABILITY:
            have, need = (".".join(map(str, version)) for version in (self.card.capability, _MIN_FP8_CAPABILITY))
            return f"kv_cache_dtype='fp8' with compute capability {have} (supported: {need} and later)"
        for size in (spec.key_head_size, spec.value_head_size):
            if size > _MAX_HEAD_SIZE:
                return f"head size {size} (supported: up to {_MAX_HEAD_SIZE})"
        if not spec.scaling > 0:
            return f"scaling={spec.scaling} (must be positive)"
        if (group := spec.num_heads // spec.num_kv_heads) > _MAX_GROUP:
            return f"{group} query heads per KV head (supported: up to {_MAX_GROUP})"
        return None

    def new_cache(
        self, num_blocks: int, block_size: int, spec: LayerSpec, dtype: torch.dtype, device: torch.device
    ) -> GpuKVCache:
        """Also compiles, for the first layer of a kind, all kernels that its steps can launch."""
        cache = gpu_kv_cache.new_cache(num_blocks, block_size, spec, dtype, device)
        if self._scratch is None:
            self._scratch = (
                torch.empty(SCRATCH_BYTES // 4, dtype=torch.float32, device=device),
                # Two numbers for each row of the above, which has at least 16.
                torch.empty(SCRATCH_BYTES // 4 // 8, dtype=torch.float32, device=device),
            )
        self._kinds.add((spec, dtype))
        if not interpreted() and (spec, dtype, block_size, True) not in self._layers:
            self._warm_up(cache, spec, dtype, block_size)
        return cache

    def prepare(self, metadata: AttentionMetadata) -> GpuBatch:
        return GpuBatch(metadata, {kind: self._plan(*kind, metadata) for kind in self._kinds})

    def write(self, key: Tensor, value: Tensor, cache: KVCache, batch: GpuBatch) -> None:
        assert isinstance(cache, GpuKVCache)
        gpu_kv_cache.write(key, value, cache, batch.metadata)

    def attend(self, query: Tensor, cache: KVCache, batch: GpuBatch, spec: LayerSpec, sinks: Tensor | None) -> Tensor:
        assert isinstance(cache, GpuKVCache)
        out = query.new_empty(query.shape[0], spec.num_heads, spec.value_head_size)
        kind = spec, query.dtype
        work = batch.work.get(kind)
        if work is None:  # a query that does not have the model's dtype
            work = batch.work[kind] = self._plan(*kind, batch.metadata)
        self._launch(out, query, cache, batch.metadata, sinks, work)
        return out

    @staticmethod
    def _is_decode(spec: LayerSpec, metadata: AttentionMetadata) -> bool:
        """Whether no request has more tokens than the rows of one short block."""
        group = spec.num_heads // spec.num_kv_heads
        return metadata.max_query_len <= padded(group) // group

    def _plan(self, spec: LayerSpec, dtype: torch.dtype, metadata: AttentionMetadata) -> _Work:
        """Launch the kernel that shares the batch's work out."""
        from inflight.kernels.gpu.gpu_attention_plan import HEADER, NUM_OPTIONS, plan_kernel  # needs the triton package
        from inflight.kernels.gpu.gpu_pdl import pdl_options

        layer = self._layer(spec, dtype, metadata.block_size, self._is_decode(spec, metadata))
        geometry, num_requests = layer.geometry, metadata.seq_lens.shape[0]
        room = room_for(geometry, metadata.slot_mapping.shape[0], num_requests, metadata.max_query_len, layer.running)
        plan = metadata.seq_lens.new_empty(HEADER.value + 4 * room.items + room.extra)
        plan_kernel[(1,)](
            metadata.query_start_loc,
            metadata.seq_lens,
            plan,
            num_requests,
            room.items,
            room.extra,
            layer.running,
            geometry.num_kv_heads,
            geometry.block_q,
            geometry.tile.block_n,
            geometry.window or 2**30,
            CHUNK=_PLAN_CHUNK,
            OPTIONS=NUM_OPTIONS,
            num_warps=8,
            **pdl_options(self._launch_pdl),
        )
        return _Work(layer, room, plan)

    def _launch(
        self,
        out: Tensor,
        query: Tensor,
        cache: GpuKVCache,
        metadata: AttentionMetadata,
        sinks: Tensor | None,
        work: _Work,
    ) -> Any:
        """Returns the launched attention kernel, as compiled."""
        from inflight.kernels.gpu.gpu_attention_kernel import attend_kernel, reduce_kernel  # needs the triton package
        from inflight.kernels.gpu.gpu_pdl import pdl_options

        assert self._scratch is not None
        layer, room = work.layer, work.room
        query, spec, tile = gpu_kv_cache.aligned(query), layer.spec, layer.geometry.tile
        kernel = attend_kernel[(spec.num_kv_heads * room.items,)](  # only the first axis has more than 65,535 programs
            out,
            *self._scratch,
            query,
            cache.key,
            cache.value,
            cache.key_scale,
            cache.value_scale,
            sinks,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            work.plan,
            metadata.block_table.stride(0),
            *gpu_kv_cache.strides(query),
            spec.scaling,
            spec.softcap or 1.0,
            room.rows,
            **layer.shapes,
            **layer.attend,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,  # scale and shift of the scores in one operation
            **pdl_options(self._launch_pdl),
        )
        if room.extra:
            rows, joins = min(room.rows, _REDUCE_GRID[0]), min(room.extra, room.blocks, _REDUCE_GRID[1])
            reduce_kernel[(rows, spec.num_kv_heads, joins)](
                out,
                *self._scratch,
                metadata.query_start_loc,
                metadata.seq_lens,
                work.plan,
                room.items,
                room.rows,
                CHUNK=_REDUCE_CHUNK,
                **layer.shapes,
                **pdl_options(self._launch_pdl),
            )
        return kernel

    def _layer(self, spec: LayerSpec, dtype: torch.dtype, block_size: int, is_decode: bool) -> _Layer:
        key = (spec, dtype, block_size, is_decode)
        layer = self._layers.get(key)
        if layer is None:
            tile = tile_for(self.card, spec, dtype, is_decode)
            # `_warm_up` sets the number of concurrent programs; until then one per SM.
            layer = self._layers[key] = _make_layer(spec, dtype, block_size, tile, self.card.num_sms)
        return layer

    def _warm_up(self, cache: GpuKVCache, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> None:
        """Launch each kernel that steps can launch for this kind of layer, once, on one request."""
        gpu_kv_cache.warm_up_write(cache, spec, dtype, block_size)
        device, group = cache.key.device, spec.num_heads // spec.num_kv_heads
        for count in (1, padded(group) // group + 1):
            metadata = gpu_kv_cache.one_request(count, block_size, device)
            query = torch.zeros(count, spec.num_heads, spec.key_head_size, dtype=dtype, device=device)
            sinks = torch.zeros(spec.num_heads, dtype=dtype, device=device) if spec.has_sinks else None
            out = query.new_empty(count, spec.num_heads, spec.value_head_size)
            work = self._plan(spec, dtype, metadata)
            layer = work.layer
            kernel = self._launch(out, query, cache, metadata, sinks, work)
            taken = (layer.geometry.tile.num_warps, kernel.n_regs, kernel.metadata.shared)
            layer.running = self.card.num_sms * self.card.programs_at_once(*taken)


def _make_layer(spec: LayerSpec, dtype: torch.dtype, block_size: int, tile: Tile, running: int) -> _Layer:
    import triton.language as tl

    group = spec.num_heads // spec.num_kv_heads
    value_padded = padded(spec.value_head_size)
    if tile.block_m:
        tile = replace(tile, block_m=max(tile.block_m, padded(group)))
    geometry = Geometry(tile, group, spec.num_kv_heads, value_padded, spec.sliding_window or 0)
    shapes = dict(
        NUM_HEADS=spec.num_heads,
        NUM_KV_HEADS=spec.num_kv_heads,
        VALUE_SIZE=spec.value_head_size,
        VALUE_PADDED=value_padded,
        SHORT_ROWS=geometry.short_rows,
        BLOCK_M=tile.block_m,
    )
    dot = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
    if dtype == torch.bfloat16 and interpreted():
        dot = tl.float32  # the interpreter multiplies the bit patterns of bfloat16
    attend = dict(
        KEY_SIZE=spec.key_head_size,
        KEY_PADDED=padded(spec.key_head_size),
        BLOCK_SIZE=block_size,
        BLOCK_N=tile.block_n,
        WINDOW=geometry.window,
        HAS_SOFTCAP=spec.softcap is not None,
        HAS_SINKS=spec.has_sinks,
        HAS_SCALES=spec.kv_cache_dtype is not None,
        ONE_LOOP=dtype == torch.float32,  # its products are unrolled: three loops would be 5000 instructions
        LATE=tile.late,
        DOT=dot,
    )
    return _Layer(spec, geometry, shapes, attend, running)
