"""The seam between a transformers model and an attention kernel.

The model calls one function per layer (`hf.py`).  It finds the step's batch in the *forward context* and
the layer's KV cache on the attention module, and passes both to an `AttentionBackend`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from inflight.attention.int8_kv import SCALE_BYTES

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "KVCache",
    "LayerAttention",
    "LayerSpec",
    "current_batch",
    "forward_context",
]


# Bytes of the scale stored with each token's key of one head, and with its value.
_SCALE_BYTES = {torch.int8: SCALE_BYTES}


@dataclass(frozen=True)
class LayerSpec:
    """The features that an attention layer requires of a kernel, found by probing the loaded model.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key/value heads; divides `num_heads` (GQA).
        key_head_size, value_head_size: elements per head.
        scaling: factor applied to query-key products.
        sliding_window: number of tokens a token attends to, including itself; None is no limit.
        softcap: scores become `softcap * tanh(score / softcap)`; None leaves them unchanged.
        has_sinks: whether a learned logit per head joins the softmax's denominator.
        kv_cache_dtype: dtype of stored keys and values; None is the model's dtype.  int8 is symmetric,
            with a bfloat16 scale per token and head (`int8.py`).
    """

    num_heads: int
    num_kv_heads: int
    key_head_size: int
    value_head_size: int
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    kv_cache_dtype: torch.dtype | None = None

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token takes in this layer's KV cache, including scales; `dtype` is the model's."""
        stored = self.kv_cache_dtype or dtype
        elements = self.key_head_size + self.value_head_size
        return self.num_kv_heads * (elements * stored.itemsize + 2 * _SCALE_BYTES.get(stored, 0))


@dataclass(slots=True)
class KVCache:
    """One layer's paged keys and values.

    Attributes:
        key: [num_blocks, block_size, num_kv_heads, key_head_size] in the reference layout.  A backend can
            use another layout after the first dimension: only its own `write` and `attend` read the tensor.
        value: the same with value_head_size.
        key_scale, value_scale: float32 [num_kv_heads] if the pool is fp8: stored = actual / scale.  Set when the
            pool is allocated, and constant from then on.
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor | None = field(default=None, kw_only=True)
    value_scale: Tensor | None = field(default=None, kw_only=True)


@dataclass(slots=True)
class AttentionMetadata:
    """The ragged batch of one step: T tokens of R requests, request after request.

    Attributes:
        query_start_loc: int32 [R + 1]; request r has tokens query_start_loc[r] .. query_start_loc[r + 1].
        seq_lens: int32 [R]; tokens of each request that have KV in the pool once this step's KV is written.
        block_table: int32 [R, max blocks per request]; entries past a request's end are undefined.
        slot_mapping: int64 [T]; slot = block * block_size + offset in the block; -1 for padding.
        query_start_loc_cpu, seq_lens_cpu: copies of the first two on the host, so that no launch waits for
            the device.
        max_query_len, max_seq_len: maxima, known on the host.
        block_size: tokens per block.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    query_start_loc_cpu: list[int]
    seq_lens_cpu: list[int]
    max_query_len: int
    max_seq_len: int
    block_size: int


class AttentionBackend(Protocol):
    """One attention kernel.

    Once per step, before the forward pass, `prepare` does all host-side work of the batch; each layer then
    passes the result to `write` and `attend`.

    Attributes:
        capturable: whether the launches depend on sizes alone, so that a CUDA graph can replay them.
    """

    name: str
    capturable: bool

    def unsupported(self, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> str | None:
        """The first feature of the layer that this kernel does not support, by name; None if it supports all."""

    def new_cache(
        self, num_blocks: int, block_size: int, spec: LayerSpec, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """Allocate one layer's KV cache; its contents are undefined."""

    def prepare(self, metadata: AttentionMetadata) -> Any:
        """The step's batch in the form that this backend's `write` and `attend` take, for layers of all kinds.

        It refers to the tensors of `metadata` and is valid as long as they are unchanged.
        """

    def write(self, key: Tensor, value: Tensor, cache: KVCache, batch: Any) -> None:
        """Store key [T, Hkv, Dk] and value [T, Hkv, Dv] in the slots of `slot_mapping`."""

    def attend(self, query: Tensor, cache: KVCache, batch: Any, spec: LayerSpec, sinks: Tensor | None) -> Tensor:
        """Causal attention of query [T, Hq, Dk] over each request's tokens: [T, Hq, Dv].

        `sinks` is [Hq] if the spec has sinks, else None.
        """


@dataclass(slots=True)
class LayerAttention:
    """Attribute `inflight` of an attention module: what its calls need besides tensors."""

    spec: LayerSpec
    backend: AttentionBackend
    cache: KVCache


_NO_BATCH = object()
_batch: Any = _NO_BATCH


class forward_context:
    """Context manager: prepares the step's batch for attention calls within the block.

    A context rather than keyword arguments of the model, which some architectures do not pass on.
    """

    def __init__(self, metadata: AttentionMetadata, backend: AttentionBackend) -> None:
        self._metadata = metadata
        self._backend = backend

    def __enter__(self) -> None:
        global _batch
        _batch = self._backend.prepare(self._metadata)

    def __exit__(self, *_: object) -> None:
        global _batch
        _batch = _NO_BATCH


def current_batch() -> Any:
    """The result of the backend's `prepare` for the running step.

    Raises:
        RuntimeError: outside of `forward_context`.
    """
    if _batch is _NO_BATCH:
        raise RuntimeError("attention was called outside of forward_context(); run the model through ModelRunner")
    return _batch
