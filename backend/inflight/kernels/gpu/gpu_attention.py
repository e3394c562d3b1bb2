"""The Triton kernels behind `AttentionBackend`: what is launched, with which shapes and grids.

Nothing here waits for the device, reads a tensor or allocates by what a batch holds, save for the
output; grids come from the host's maxima.  A launch can therefore be captured in a CUDA graph, to be
replayed for any batch of as many tokens and requests or fewer (rows without tokens are skipped).
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from inflight.attention.base import AttentionMetadata, KVCache, LayerSpec
from inflight.kernels.gpu.gpu_attention_configs import (
    SCRATCH_BYTES,
    Card,
    Geometry,
    SplitPlan,
    Tile,
    padded,
    plan_splits,
    tile_for,
)

__all__ = ["GpuAttention", "TritonKVCache", "interpreted", "unavailable"]

_MAX_HEAD_SIZE = 256
_MAX_GROUP = 64
_MIN_CAPABILITY = (8, 0)
_MIN_FP8_CAPABILITY = (8, 9)
_BLOCK_T = 16  # tokens that a program writes
# Room between the largest key or value of the first batch and the largest that e4m3 can hold.
_FP8_MARGIN = 4.0
# What the interpreter plays.
_H200 = Card((9, 0), 132, 227 * 1024)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def unavailable() -> str | None:
    """Why the kernels cannot run here at all, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the triton package (pip install 'triton>=3.6')"
    if not torch.cuda.is_available():
        return None if interpreted() else "a CUDA device (on a CPU it runs in tests only, with TRITON_INTERPRET=1)"
    if not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang")))):
        return "a C compiler, with which Triton builds what launches a kernel (apt install gcc)"
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_CAPABILITY:
        return f"a card of compute capability {_dotted(capability)} (it has {_dotted(_MIN_CAPABILITY)} and up)"
    return None


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    """Imported on first use: the triton package is there only where there is a GPU."""
    from inflight.kernels.gpu import gpu_attention_kernel, gpu_kv_write

    return gpu_attention_kernel, gpu_kv_write


@dataclass(slots=True)
class TritonKVCache(KVCache):
    """`key` and `value` are [num_blocks, num_kv_heads, block_size, size].

    Attributes:
        key_scale, value_scale: float32 [num_kv_heads] where the cache is fp8: stored = actual / scale.
        scaled: whether the scales are those of real keys and values yet.
    """

    key_scale: Tensor | None
    value_scale: Tensor | None
    scaled: bool


@dataclass(slots=True)
class _Layer:
    """A kind of layer's compiled shapes.

    Attributes:
        shapes: constants that the kernels of attention and reduction share.
        attend: those of attention alone.
        running: attention programs that the card runs at once.
    """

    geometry: Geometry
    shapes: dict[str, Any]
    attend: dict[str, Any]
    running: int


class GpuAttention:
    """Implements `AttentionBackend` on an NVIDIA GPU.

    Args:
        card: None takes the device's; tests and benchmarks name another.
    """

    name = "triton"

    def __init__(self, card: Card | None = None) -> None:
        self._card = card
        self._layers: dict[tuple[LayerSpec, torch.dtype, int, bool], _Layer] = {}
        self._scratch: tuple[Tensor, Tensor] | None = None
        # The step whose plans these are: layers of one kind share them.
        self._step: AttentionMetadata | None = None
        self._plans: dict[int, SplitPlan] = {}

    @property
    def card(self) -> Card:
        if self._card is None:
            self._card = Card.of(torch.device("cuda")) if torch.cuda.is_available() else _H200
        return self._card

    def unsupported(self, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> str | None:
        if (lack := unavailable()) is not None:
            return lack
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"dtype {str(dtype).removeprefix('torch.')} (it has float32, bfloat16 and float16)"
        if spec.kv_cache_dtype not in (None, torch.float8_e4m3fn):
            return f"kv_cache_dtype={str(spec.kv_cache_dtype).removeprefix('torch.')!r} (it has 'auto' and 'fp8')"
        if spec.kv_cache_dtype is not None and self.card.capability < _MIN_FP8_CAPABILITY:
            return (
                f"kv_cache_dtype='fp8' on a card of compute capability {_dotted(self.card.capability)} "
                f"(it takes {_dotted(_MIN_FP8_CAPABILITY)} and up)"
            )
        for size in (spec.key_head_size, spec.value_head_size):
            if size > _MAX_HEAD_SIZE:
                return f"head size {size} (it has up to {_MAX_HEAD_SIZE})"
        if not spec.scaling > 0:
            return f"a scaling of {spec.scaling} (it must be positive)"
        if (group := spec.num_heads // spec.num_kv_heads) > _MAX_GROUP:
            return f"{group} query heads per KV head (it has up to {_MAX_GROUP})"
        return None

    def new_cache(
        self, num_blocks: int, block_size: int, spec: LayerSpec, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """Also compiles, at the first layer of a kind, all that its steps can ask for."""
        stored = spec.kv_cache_dtype or dtype
        shape = (num_blocks, spec.num_kv_heads, block_size)
        has_scales = spec.kv_cache_dtype is not None
        key_scale, value_scale = (
            torch.ones(spec.num_kv_heads, device=device) if has_scales else None for _ in range(2)
        )
        cache = TritonKVCache(
            torch.empty(*shape, spec.key_head_size, dtype=stored, device=device),
            torch.empty(*shape, spec.value_head_size, dtype=stored, device=device),
            key_scale,
            value_scale,
            scaled=False,
        )
        if self._scratch is None:
            self._scratch = (
                torch.empty(SCRATCH_BYTES // 4, dtype=torch.float32, device=device),
                torch.empty(SCRATCH_BYTES // 4 // 8, dtype=torch.float32, device=device),  # 2 for at least 16
            )
        if not interpreted() and (spec, dtype, block_size, True) not in self._layers:
            self._warm_up(cache, spec, dtype, block_size)
        return cache

    def write(self, key: Tensor, value: Tensor, cache: KVCache, metadata: AttentionMetadata) -> None:
        assert isinstance(cache, TritonKVCache)
        if cache.key_scale is not None and not cache.scaled:
            _scale_to_fit(key, value, cache)
        key, value = _aligned(key), _aligned(value)
        num_tokens, num_kv_heads, key_size = key.shape
        value_size = value.shape[2]
        _kernels()[1].write_kernel[(-(-num_tokens // _BLOCK_T), num_kv_heads)](
            key,
            value,
            cache.key,
            cache.value,
            cache.key_scale,
            cache.value_scale,
            metadata.slot_mapping,
            num_tokens,
            *_strides(key),
            *_strides(value),
            NUM_KV_HEADS=num_kv_heads,
            KEY_SIZE=key_size,
            VALUE_SIZE=value_size,
            KEY_PADDED=padded(key_size),
            VALUE_PADDED=padded(value_size),
            BLOCK_SIZE=metadata.block_size,
            HAS_SCALES=cache.key_scale is not None,
            BLOCK_T=_BLOCK_T,
        )

    def attend(
        self, query: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: LayerSpec, sinks: Tensor | None
    ) -> Tensor:
        out = query.new_empty(query.shape[0], spec.num_heads, spec.value_head_size)
        is_decode = metadata.max_query_len <= padded(group := spec.num_heads // spec.num_kv_heads) // group
        layer = self._layer(spec, query.dtype, metadata.block_size, is_decode)
        if metadata is not self._step:
            self._step, self._plans = metadata, {}
        plan = self._plans.get(id(layer))
        if plan is None:
            plan = self._plans[id(layer)] = plan_splits(layer.geometry, metadata, layer.running)
        self._launch(out, query, cache, metadata, spec, sinks, layer, plan)
        return out

    def _launch(
        self,
        out: Tensor,
        query: Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        spec: LayerSpec,
        sinks: Tensor | None,
        layer: _Layer,
        plan: SplitPlan,
    ) -> Any:
        """Returns Triton's handle of the attention kernel."""
        assert isinstance(cache, TritonKVCache) and self._scratch is not None
        query = _aligned(query)
        kernels, tile = _kernels()[0], layer.geometry.tile
        num_requests = metadata.seq_lens.shape[0]
        num_blocks = layer.geometry.num_blocks(query.shape[0], num_requests)
        starts, lens = metadata.query_start_loc, metadata.seq_lens
        kernel = kernels.attend_kernel[(spec.num_kv_heads, num_blocks, plan.num_splits)](
            out,
            *self._scratch,
            query,
            cache.key,
            cache.value,
            cache.key_scale,
            cache.value_scale,
            sinks,
            starts,
            lens,
            metadata.block_table,
            num_requests,
            metadata.block_table.stride(0),
            *_strides(query),
            spec.scaling,
            spec.softcap or 1.0,
            plan.split_tiles,
            plan.num_splits,
            plan.slot_rows,
            int(plan.short_only),
            **layer.shapes,
            **layer.attend,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,  # scale and shift of the scores are one operation
        )
        if plan.num_splits > 1:
            rows = min(plan.slot_rows, metadata.max_query_len * layer.geometry.group)
            kernels.reduce_kernel[(rows, spec.num_kv_heads, plan.slots)](
                out,
                *self._scratch,
                starts,
                lens,
                num_requests,
                plan.split_tiles,
                plan.num_splits,
                plan.slot_rows,
                int(plan.short_only),
                **layer.shapes,
            )
        return kernel

    def _layer(self, spec: LayerSpec, dtype: torch.dtype, block_size: int, is_decode: bool) -> _Layer:
        key = (spec, dtype, block_size, is_decode)
        layer = self._layers.get(key)
        if layer is None:
            tile = tile_for(self.card, spec, dtype, is_decode)
            layer = self._layers[key] = _make_layer(spec, dtype, block_size, tile)
            layer.running = self.card.num_sms  # until `_warm_up` knows better
        return layer

    def _warm_up(self, cache: TritonKVCache, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> None:
        """Launch each kernel that steps of this kind of layer can ask for, once, on one request."""
        self._warm_up_write(cache, spec, dtype, block_size)
        device, group = cache.key.device, spec.num_heads // spec.num_kv_heads
        for count in (1, padded(group) // group + 1):
            metadata = _one_request(count, block_size, device)
            query = torch.zeros(count, spec.num_heads, spec.key_head_size, dtype=dtype, device=device)
            sinks = torch.zeros(spec.num_heads, dtype=dtype, device=device) if spec.has_sinks else None
            out = query.new_empty(count, spec.num_heads, spec.value_head_size)
            layer = self._layer(spec, dtype, block_size, is_decode=count == 1)
            rows = layer.geometry.tile.block_m or layer.geometry.short_rows
            split = SplitPlan(2, 1, layer.geometry.num_blocks(count, 1), rows, False)
            kernel = self._launch(out, query, cache, metadata, spec, sinks, layer, split)
            taken = (layer.geometry.tile.num_warps, kernel.n_regs, kernel.metadata.shared)
            layer.running = self.card.num_sms * self.card.programs_at_once(*taken)

    def _warm_up_write(self, cache: TritonKVCache, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> None:
        key, value = (
            torch.zeros(1, spec.num_kv_heads, size, dtype=dtype, device=cache.key.device)
            for size in (spec.key_head_size, spec.value_head_size)
        )
        scaled, cache.scaled = cache.scaled, True
        self.write(key, value, cache, _one_request(1, block_size, cache.key.device))
        cache.scaled = scaled


def _make_layer(spec: LayerSpec, dtype: torch.dtype, block_size: int, tile: Tile) -> _Layer:
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
        WINDOW=geometry.window,
        SHORT_ROWS=geometry.short_rows,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
    )
    dot = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
    if dtype == torch.bfloat16 and interpreted():
        dot = tl.float32  # the interpreter multiplies the bit patterns of bfloat16
    attend = dict(
        KEY_SIZE=spec.key_head_size,
        KEY_PADDED=padded(spec.key_head_size),
        BLOCK_SIZE=block_size,
        HAS_SOFTCAP=spec.softcap is not None,
        HAS_SINKS=spec.has_sinks,
        HAS_SCALES=spec.kv_cache_dtype is not None,
        ONE_LOOP=dtype == torch.float32,  # its products are unrolled: three loops would be 5000 instructions
        DOT=dot,
    )
    return _Layer(geometry, shapes, attend, running=1)


def _one_request(count: int, block_size: int, device: torch.device) -> AttentionMetadata:
    """A prompt of `count` tokens in the pool's first blocks, of which there may be but one."""
    block_table = torch.zeros(1, -(-count // block_size), dtype=torch.int32, device=device)
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
        block_table=block_table,
        slot_mapping=torch.full((count,), -1, dtype=torch.int64, device=device),
        query_starts=[0, count],
        lens=[count],
        max_query_len=count,
        max_seq_len=count,
        block_size=block_size,
    )


def _scale_to_fit(key: Tensor, value: Tensor, cache: TritonKVCache) -> None:
    """Scales per head from the first batch: at load, the one that is compared with transformers' attention."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    for x, scale in ((key, cache.key_scale), (value, cache.value_scale)):
        assert scale is not None
        scale.copy_(x.abs().amax(dim=(0, 2)).float().clamp_min(1e-6) * (_FP8_MARGIN / largest))
    cache.scaled = True


def _aligned(x: Tensor) -> Tensor:
    """x [T, heads, size] with contiguous elements and 16-byte rows: kernels are compiled for those alone."""
    if x.shape[2] % 16 == 0 and x.stride(2) == 1 and not (x.data_ptr() | x.stride(0) | x.stride(1)) % 16:
        return x
    return x.contiguous()


def _strides(x: Tensor) -> tuple[int, int]:
    """Elements from token to token and from head to head; torch leaves them void where there is but one."""
    tokens, heads, size = x.shape
    return x.stride(0) if tokens > 1 else heads * size, x.stride(1) if heads > 1 else size


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
