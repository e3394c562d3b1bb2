"""Adapters of a model that runs through transformers' modules: each linear layer adds what its rows' adapters add.

The results of a layer grow after its product, in the rows that have adapters; the other rows are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from inflight.loading.adapter_weights import Matrices
from inflight.loading.forward.adaptable_layers import called_with_all, linears_of, module_of, sizes_of

__all__ = ["AdaptedModules"]


class _Adapter(NamedTuple):
    """
    Attributes:
        matrices: a and b, by the layers' paths.
    """

    matrices: Mapping[str, tuple[Tensor, Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self.matrices.values())


class AdaptedModules:
    """Implements `AdaptedModel`.

    Args:
        model: transformers' module, whose linear layers may be packed or in codes.
        dtype: of their inputs.
        trial: runs the model over a few tokens, and returns how many.
    """

    max_adapters: int | None = None
    nbytes, capturable = 0, False

    def __init__(self, model: Any, dtype: torch.dtype, trial: Callable[[], int]) -> None:
        self.dtype = dtype
        self._rows: list[tuple[_Adapter, Tensor]] = []
        self._num_tokens = 0
        linears = linears_of(module_of(model))
        called = called_with_all(linears, trial)
        self.layers: Mapping[str, tuple[int, int]] = {path: sizes_of(linears[path]) for path in called}
        for path in called:
            linears[path].register_forward_hook(_Added(self, path))

    def pack(self, matrices: Mapping[str, Matrices], pause: Callable[[], None]) -> _Adapter:
        found = {}
        for path, pair in matrices.items():
            found[path] = pair.tensors(self.dtype, pause)
        return _Adapter(found)

    def set_rows(self, adapters: Sequence[_Adapter | None], num_tokens: Sequence[int]) -> None:
        tokens: dict[int, list[int]] = {}
        of_id = {id(adapter): adapter for adapter in adapters if adapter is not None}
        start = 0
        for adapter, count in zip(adapters, num_tokens):
            if adapter is not None:
                tokens.setdefault(id(adapter), []).extend(range(start, start + count))
            start += count
        self._rows = [(of_id[key], torch.tensor(indices)) for key, indices in tokens.items()]
        self._num_tokens = start

    def expect(self, num_tokens: int) -> None:
        pass

    def add(self, path: str, x: Tensor, y: Tensor) -> Tensor:
        """y [..., out_features], what the layer has computed of x [..., in_features], with what the adapters add."""
        rows = [(adapter.matrices[path], indices) for adapter, indices in self._rows if path in adapter.matrices]
        if not rows:
            return y
        inputs, outputs = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]).clone()
        if len(inputs) != self._num_tokens:
            raise RuntimeError(f"{path} was called with {len(inputs)} rows in place of {self._num_tokens} tokens")
        for (a, b), indices in rows:
            own = inputs[indices].to(a.dtype)
            outputs[indices] += ((own @ a.t()) @ b.t()).to(outputs.dtype)
        return outputs.view(y.shape)


class _Added:
    """A forward hook of a linear layer."""

    def __init__(self, adapted: AdaptedModules, path: str) -> None:
        self._adapted, self._path = adapted, path

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return self._adapted.add(self._path, inputs[0], output)
