"""A card's fp8 computations on a CPU: linear layers by their twin, attention on a rounded pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from inflight.attention.base import AttentionBackend, KVCache, LayerSpec
from inflight.attention.reference import ReferenceAttention
from inflight.loading import loader
from inflight.loading.quantization import fp8_linear

__all__ = ["Fp8Reference", "fp8_twins"]

E4M3 = torch.float8_e4m3fn


class Fp8Reference(ReferenceAttention):
    """The reference kernel on a pool with the values of an fp8 pool, in the model's dtype."""

    def unsupported(self, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> str | None:
        return None

    def new_cache(self, num_blocks: int, block_size: int, spec: LayerSpec, *args: Any) -> KVCache:
        cache = super().new_cache(num_blocks, block_size, replace(spec, kv_cache_dtype=None), *args)
        cache.key_scale, cache.value_scale = (torch.ones(spec.num_kv_heads) for _ in range(2))
        return cache

    def write(self, key: Tensor, value: Tensor, cache: KVCache, batch: Any) -> None:
        super().write(_rounded(key, cache.key_scale), _rounded(value, cache.value_scale), cache, batch)


def _rounded(x: Tensor, scale: Tensor | None) -> Tensor:
    """x [T, heads, size]"""
    assert scale is not None
    stored = (x.float() / scale[:, None]).clamp(-448, 448).to(E4M3)
    return (stored.float() * scale[:, None]).to(x.dtype)


@contextmanager
def fp8_twins() -> Iterator[None]:
    """Weights and KV in fp8 load and run on this CPU."""
    select_attention = loader.select_attention

    def select(name: str, specs: list[LayerSpec], *args: Any) -> AttentionBackend:
        if name == "auto" and specs[0].kv_cache_dtype == E4M3:
            return Fp8Reference()
        return select_attention(name, specs, *args)

    with (
        patch.object(fp8_linear, "unsupported", lambda device, dtype: None),
        patch.object(loader, "select_attention", select),
    ):
        yield
