"""The seam between a transformers model and an attention kernel.

The model calls one function per layer (`hf.py`).  That function finds the batch of the running
step in the *forward context* and the layer's KV cache on the attention module, and hands both to
an `AttentionBackend`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "KV_DTYPES",
    "AttentionBackend",
    "AttentionMetadata",
    "KVCache",
    "LayerAttention",
    "LayerSpec",
    "current_metadata",
    "forward_context",
    "kv_dtype_lacks",
]


# What `kv_cache_dtype` of the configuration means; None is the model's own dtype.
KV_DTYPES: dict[str, torch.dtype | None] = {"auto": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Bytes of the scale that a token's key of one head carries, and its value another.
_SCALE_BYTES = {torch.int8: 2}


def kv_dtype_lacks(asked: torch.dtype | None, *has: str) -> str:
    """What `AttentionBackend.unsupported` says of a `kv_cache_dtype` that a kernel lacks."""
    name = next(name for name, dtype in KV_DTYPES.items() if dtype == asked)
    return f"kv_cache_dtype={name!r} (it has {' and '.join(map(repr, has))})"


@dataclass(frozen=True)
class LayerSpec:
    """What one attention layer asks of a kernel, as seen in a probe of the loaded model.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key/value heads; `num_heads` is a multiple of it (GQA).
        key_head_size, value_head_size: elements per head.
        scaling: factor on the query-key products.
        sliding_window: a token sees this many tokens, itself included; None sees all.
        softcap: scores become `softcap * tanh(score / softcap)`; None leaves them.
        has_sinks: one learned logit per head joins the softmax's denominator.
        kv_cache_dtype: what keys and values are stored as; None is the model's own dtype.  int8 is
            symmetric with a bfloat16 scale per token and head (`int8.py`).
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
        """Bytes that one token takes in this layer's KV cache, scales included; `dtype` is the model's."""
        stored = self.kv_cache_dtype or dtype
        elements = self.key_head_size + self.value_head_size
        return self.num_kv_heads * (elements * stored.itemsize + 2 * _SCALE_BYTES.get(stored, 0))


@dataclass(slots=True)
class KVCache:
    """One layer's paged keys and values.

    Attributes:
        key: [num_blocks, block_size, num_kv_heads, key_head_size] in the reference layout; a
            backend may use another, its own `write` and `attend` being the only readers.
        value: the same with value_head_size.
    """

    key: Tensor
    value: Tensor


@dataclass(slots=True)
class AttentionMetadata:
    """The ragged batch of one step: R requests, T tokens, requests' tokens side by side.

    Attributes:
        query_start_loc: int32 [R + 1]; request r's tokens are rows start[r] .. start[r + 1].
        seq_lens: int32 [R]; tokens whose KV a request has once this step's are written.
        block_table: int32 [R, max blocks of a request]; entries past a request's end are void.
        slot_mapping: int64 [T]; slot = block * block_size + offset of each token, -1 pads.
        query_starts, lens: the first two as host lists, so that no kernel waits for the device.
        max_query_len, max_seq_len: host-known maxima, for grid sizes.
        block_size: tokens in a block.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    query_starts: list[int]
    lens: list[int]
    max_query_len: int
    max_seq_len: int
    block_size: int


class AttentionBackend(Protocol):
    """One kernel.  Stateless apart from what `new_cache` returns."""

    name: str

    def unsupported(self, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> str | None:
        """The feature of the layer that this kernel lacks, or None when it can run it."""

    def new_cache(
        self, num_blocks: int, block_size: int, spec: LayerSpec, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """Allocate one layer's KV cache; contents are undefined until written."""

    def write(self, key: Tensor, value: Tensor, cache: KVCache, metadata: AttentionMetadata) -> None:
        """Store key [T, Hkv, Dk] and value [T, Hkv, Dv] in the slots of `slot_mapping`."""

    def attend(
        self, query: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: LayerSpec, sinks: Tensor | None
    ) -> Tensor:
        """Causal attention of query [T, Hq, Dk] over each request's own tokens: [T, Hq, Dv].

        `sinks` is [Hq] where the spec has them.
        """


@dataclass(slots=True)
class LayerAttention:
    """Hangs on an attention module as `module.inflight`: what its calls need besides tensors."""

    spec: LayerSpec
    backend: AttentionBackend
    cache: KVCache


_metadata: AttentionMetadata | None = None


@contextmanager
def forward_context(metadata: AttentionMetadata) -> Iterator[None]:
    """Make `metadata` the batch that attention calls inside the block work on.

    Not keyword arguments of the model: some architectures drop them on the way down.
    """
    global _metadata
    _metadata = metadata
    try:
        yield
    finally:
        _metadata = None


def current_metadata() -> AttentionMetadata:
    """The running step's batch.

    Raises:
        RuntimeError: outside of `forward_context`.
    """
    if _metadata is None:
        raise RuntimeError("attention was called outside of a step: run the model through ModelRunner")
    return _metadata
