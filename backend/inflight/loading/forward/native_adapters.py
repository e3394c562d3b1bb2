"""Adapters of the native CPU decoder: a row of any adapter, or of none, has the same bits in every batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from inflight.kernels.cpu.cpu_decoder import StepAdapters
from inflight.kernels.cpu.cpu_linear import PackedWeight
from inflight.kernels.cpu.cpu_lora import LowRank, PackedAdapter
from inflight.loading.adapter_weights import Matrices
from inflight.loading.forward.native_decoder import NativeDecoder

__all__ = ["NativeAdapters"]


class NativeAdapters:
    """Implements `AdaptedModel`."""

    def __init__(self, decoder: NativeDecoder) -> None:
        self._decoder = decoder
        self.dtype = decoder.dtype
        self.layers: dict[str, tuple[int, int]] = {}
        # Of each projection: its weight, and the paths of its layers with their first features.
        self._projections: list[tuple[PackedWeight, list[tuple[str, int]]]] = []
        for layer in decoder.tables.layers:
            paths = iter(layer.modules)
            for weight in layer.projections:
                self._projections.append((weight, self._layers_of(weight, paths)))

    def _layers_of(self, weight: PackedWeight, paths: Iterator[str]) -> list[tuple[str, int]]:
        found, start = [], 0
        part: PackedWeight | None = weight
        while part is not None:
            for size, path in zip(part.sizes, paths):
                found.append((path, start))
                self.layers[path] = weight.in_features, size
                start += size
            part = part.further
        return found

    def pack(self, matrices: Mapping[str, Matrices]) -> PackedAdapter:
        return PackedAdapter(
            [
                (weight, [LowRank(start, matrices[path].a, matrices[path].b) for path, start in layers if path in matrices])
                for weight, layers in self._projections
            ]
        )

    def set_rows(self, adapters: Sequence[PackedAdapter | None], num_tokens: Sequence[int]) -> None:
        used = [adapter for adapter in adapters if adapter is not None]
        if not used:
            self._decoder.adapters = None
            return
        of_row = torch.tensor([0 if adapter is None else adapter.address for adapter in adapters])
        of_token = of_row.repeat_interleave(torch.tensor(num_tokens))
        self._decoder.adapters = StepAdapters(of_token, max(adapter.inner for adapter in used), used)
