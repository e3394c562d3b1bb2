"""A model's attention layers with their KV caches attached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from inflight.attention.base import AttentionBackend, KVCache, LayerAttention, LayerSpec
from inflight.loading.checkpoint.kv_scales import KVScales

__all__ = ["PagedLayers"]


class PagedLayers:
    """Gives each attention module the attribute `inflight`, and the pool its size.

    Args:
        layers: attention modules with what they require of a kernel.
        writes_pages: write the pool when it is allocated.  Otherwise the first write to each page waits for the
            system to provide it: with huge pages on a virtual machine tens of milliseconds every few thousand
            tokens, which no step budget accounts for.
        scales: of each layer's keys and values, if the pool is fp8; every pool that is allocated uses these tensors.

    Attributes:
        bytes_per_block: of one KV block in all layers.
        caches: the layers' caches, empty before `allocate`.
    """

    def __init__(
        self,
        layers: Sequence[tuple[nn.Module, LayerSpec]],
        backend: AttentionBackend,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        writes_pages: bool = False,
        scales: Sequence[KVScales] | None = None,
    ) -> None:
        self.bytes_per_block = block_size * sum(spec.bytes_per_token(dtype) for _, spec in layers)
        self.caches: list[KVCache] = []
        self._layers = layers
        self._backend = backend
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._writes_pages = writes_pages
        self._scales = scales

    def allocate(self, num_blocks: int) -> None:
        """Allocate a pool of `num_blocks`, in place of the present one.

        Every holder of a module's `LayerAttention` sees the new cache; addresses of the old one are invalid.
        """
        self.caches = []
        for index, (module, spec) in enumerate(self._layers):
            cache = self._backend.new_cache(num_blocks, self._block_size, spec, self._dtype, self._device)
            if self._writes_pages:
                cache.key.zero_()
                cache.value.zero_()
            if self._scales is not None:
                cache.key_scale, cache.value_scale = self._scales[index]
            self.caches.append(cache)
            attached = getattr(module, "inflight", None)
            if isinstance(attached, LayerAttention):
                attached.cache = cache
            else:
                module.inflight = LayerAttention(spec, self._backend, cache)  # type: ignore[assignment]

    @contextmanager
    def standing_in(self, backend: AttentionBackend, num_blocks: int, dtype: torch.dtype) -> Iterator[AttentionBackend]:
        """Let another kernel with a small pool of its own compute the model's attention within the block.

        Args:
            dtype: of its keys and values.
        """
        attached = [module.inflight for module, _ in self._layers]
        for module, spec in self._layers:
            plain = replace(spec, kv_cache_dtype=None)
            cache = backend.new_cache(num_blocks, self._block_size, plain, dtype, self._device)
            module.inflight = LayerAttention(plain, backend, cache)  # type: ignore[assignment]
        try:
            yield backend
        finally:
            for (module, _), layer in zip(self._layers, attached):
                module.inflight = layer
