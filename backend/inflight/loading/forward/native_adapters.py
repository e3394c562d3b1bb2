"""Adapters of the native CPU decoder: a row of any adapter, or of none, has the same bits in every batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from inflight.kernels.cpu.cpu_decoder import StepAdapters
from inflight.kernels.cpu.cpu_linear import PackedWeight
from inflight.kernels.cpu.cpu_lora import LowRank, PackedAdapter
from inflight.loading.adapter_weights import Matrices
from inflight.loading.forward.native_decoder import NativeDecoder

__all__ = ["NativeAdapters"]


class NativeAdapters:
    """Implements `AdaptedModel`."""

    max_adapters: int | None = None
    nbytes, capturable = 0, False

    def __init__(self, decoder: NativeDecoder) -> None:
        self._decoder = decoder
        self.dtype = decoder.dtype
        found: dict[str, tuple[int, int]] = {}
        self.layers: Mapping[str, tuple[int, int]] = found
        # Of each projection: its weight, and the paths of its layers with their first features.
        self._projections: list[tuple[PackedWeight, list[tuple[str, int]]]] = []
        for layer in decoder.tables.layers:
            paths = iter(layer.modules)
            for weight in layer.projections:
                starts, start = [], 0
                for size, path in zip(
                    _sizes(weight), paths
                ):  # in this order: at its end, zip has taken one more of the first
                    starts.append((path, start))
                    found[path] = weight.in_features, size
                    start += size
                self._projections.append((weight, starts))

    def pack(self, matrices: Mapping[str, Matrices], pause: Callable[[], None]) -> PackedAdapter:
        packed = PackedAdapter(len(self._projections), self.dtype)
        for index, (weight, layers) in enumerate(self._projections):
            used = [(start, matrices[path]) for path, start in layers if path in matrices]
            if not used:
                continue
            wrong = packed.fill(index, weight, [LowRank(start, *each.stored(), each.scale) for start, each in used])
            if wrong is not None:
                pair = used[wrong.layer][1].pair
                raise used[wrong.layer][1].not_finite((pair.b if wrong.is_b else pair.a).key, self.dtype)
            pause()
        return packed

    def set_rows(self, adapters: Sequence[PackedAdapter | None], num_tokens: Sequence[int]) -> None:
        used = [adapter for adapter in adapters if adapter is not None]
        if not used:
            self._decoder.adapters = None
            return
        of_row = torch.tensor([0 if adapter is None else adapter.address for adapter in adapters])
        of_token = of_row.repeat_interleave(torch.tensor(num_tokens))
        self._decoder.adapters = StepAdapters(of_token, max(adapter.inner for adapter in used), used)

    def expect(self, num_tokens: int) -> None:
        pass


def _sizes(weight: PackedWeight) -> list[int]:
    """Outputs of the layers of a projection."""
    return [*weight.sizes, *([] if weight.further is None else _sizes(weight.further))]
