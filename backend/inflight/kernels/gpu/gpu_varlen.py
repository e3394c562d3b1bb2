"""Whole prompts by torch's `varlen_attn` (`kernel_config.varlen_attention`); all else is `GpuAttention`'s.

A step whose requests all compute their first tokens, with nothing of them in the pool yet, attends only to its own keys
and values.  They are gathered from the pool, where they have just been written: a copy of them costs little beside a
long prompt's attention.  A CUDA graph captures `GpuAttention`'s kernels alone: a replay has other lengths than those on
the host, by which whole prompts are recognised.

`varlen_attn` is torch's FlashAttention-2: https://docs.pytorch.org/docs/2.12/nn.attention.varlen.html.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inflight.attention.base import AttentionMetadata, KVCache, LayerSpec
from inflight.attention.reference import attend_request
from inflight.kernels.gpu.gpu_attention import GpuAttention, GpuBatch
from inflight.kernels.gpu.gpu_attention_configs import Card
from inflight.kernels.gpu.gpu_kv_cache import GpuKVCache

__all__ = ["VarlenAttention"]

_log = logging.getLogger(__name__)

_TRIED_PROMPTS = (17, 40)
_TOLERANCE = 4  # of the relative error of a product, in units of the dtype's rounding


@dataclass(slots=True)
class _Batch(GpuBatch):
    """A step's batch.

    Attributes:
        places: of each token in the pool, block and offset, int64 [T] each; None if not all requests are whole prompts.
    """

    places: tuple[Tensor, Tensor] | None


class VarlenAttention(GpuAttention):
    """Implements `AttentionBackend`.  Layers that `varlen_attn` does not support are named in the log, and ours."""

    def __init__(self, card: Card | None = None, launch_pdl: bool = False) -> None:
        super().__init__(card, launch_pdl)
        self._unfit: dict[tuple[LayerSpec, torch.dtype], str | None] = {}

    def new_cache(
        self, num_blocks: int, block_size: int, spec: LayerSpec, dtype: torch.dtype, device: torch.device
    ) -> GpuKVCache:
        """Also tries `varlen_attn` on two prompts, for the first layer of a kind."""
        if (spec, dtype) not in self._unfit:
            reason = _unsupported(spec, dtype) or _wrong(spec, dtype, device)
            self._unfit[spec, dtype] = reason
            if reason is not None:
                _log.warning("kernel_config: varlen_attention is not used, but the gpu kernel: %s", reason)
        return super().new_cache(num_blocks, block_size, spec, dtype, device)

    def prepare(self, metadata: AttentionMetadata) -> _Batch:
        places = None
        if _are_whole_prompts(metadata) and not _is_capturing():
            slots = metadata.slot_mapping
            places = slots.div(metadata.block_size, rounding_mode="floor"), slots % metadata.block_size
        batch = _Batch(metadata, {}, places)
        batch.work.update({kind: self._plan(*kind, metadata) for kind in self._kinds if not self._fits(*kind, batch)})
        return batch

    def attend(self, query: Tensor, cache: KVCache, batch: GpuBatch, spec: LayerSpec, sinks: Tensor | None) -> Tensor:
        assert isinstance(batch, _Batch)
        if batch.places is None or not self._fits(spec, query.dtype, batch):
            return super().attend(query, cache, batch, spec, sinks)
        # The pool is [blocks, Hkv, block_size, size]: indexed so, [T, Hkv, size].
        blocks, offsets = batch.places
        key, value = cache.key[blocks, :, offsets], cache.value[blocks, :, offsets]
        query = query if query.stride(-1) == 1 else query.contiguous()
        metadata = batch.metadata
        return _attend(query, key, value, metadata.query_start_loc, metadata.max_query_len, spec)

    def _fits(self, spec: LayerSpec, dtype: torch.dtype, batch: _Batch) -> bool:
        """Whether `varlen_attn` computes this layer in this step."""
        if batch.places is None or self._is_decode(spec, batch.metadata):
            return False
        return self._unfit.get((spec, dtype), "not a layer of the model") is None


def _are_whole_prompts(metadata: AttentionMetadata) -> bool:
    starts, seq_lens = metadata.query_start_loc_cpu, metadata.seq_lens_cpu
    return all(end - start == length for start, end, length in zip(starts, starts[1:], seq_lens))


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _attend(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, spec: LayerSpec) -> Tensor:
    """query [T, Hq, D], key and value [T, Hkv, D], starts int32 [R + 1] -> [T, Hq, D]: each token attends to those
    of its request up to itself."""
    options: dict[str, Any] = {"scale": spec.scaling, "window_size": (-1, 0)}
    call, names_groups = _varlen_attn()
    if names_groups and spec.num_heads != spec.num_kv_heads:
        options["enable_gqa"] = True
    return call(query, key, value, starts, starts, longest, longest, **options)


def _unsupported(spec: LayerSpec, dtype: torch.dtype) -> str | None:
    """The first feature of a layer that `varlen_attn` does not support, by name."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {str(dtype).removeprefix('torch.')} (supported: bfloat16 and float16)"
    if spec.kv_cache_dtype is not None:
        return f"a KV pool in {str(spec.kv_cache_dtype).removeprefix('torch.')}"
    if spec.sliding_window is not None:
        return f"a sliding window of {spec.sliding_window} tokens"
    if spec.softcap is not None:
        return f"a soft cap of {spec.softcap}"
    if spec.has_sinks:
        return "sinks"
    sizes = spec.key_head_size, spec.value_head_size
    if sizes[0] != sizes[1] or sizes[0] % 8:
        return f"head sizes {sizes[0]} and {sizes[1]} (supported: multiples of 8, equal for keys and values)"
    return None


@torch.inference_mode()
def _wrong(spec: LayerSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """How the attention of random prompts differs from the reference, or which error it raises; None if it is right."""
    generator, total = torch.Generator().manual_seed(0), sum(_TRIED_PROMPTS)
    shapes = [(total, heads, spec.key_head_size) for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
    query, key, value = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    starts = torch.tensor([0, _TRIED_PROMPTS[0], total], dtype=torch.int32, device=device)
    parts = zip(*(x.float().split(_TRIED_PROMPTS) for x in (query, key, value)))
    expected = torch.cat([attend_request(q, k, v, spec, None) for q, k, v in parts])
    try:
        out = _attend(query, key, value, starts, max(_TRIED_PROMPTS), spec).float()
        off = float((out - expected).norm() / expected.norm())
    except Exception as error:  # no such function, other arguments, no kernel for this card
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None if off <= _TOLERANCE * torch.finfo(dtype).eps else f"its results differ by {off:.1%} from the reference"


@functools.cache
def _varlen_attn() -> tuple[Callable[..., Any], bool]:
    """torch's function, and whether heads of queries that share a key are to be named (torch 2.12 and later).

    Raises:
        ImportError: this torch has none.
    """
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters
