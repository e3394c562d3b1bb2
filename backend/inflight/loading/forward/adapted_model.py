"""The seam for models that compute some rows with adapters (LoRA), and the choice of an answer for a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from inflight.loading.adapter_weights import Matrices
from inflight.loading.forward.native_adapters import NativeAdapters
from inflight.loading.forward.native_decoder import NativeDecoder

__all__ = ["AdaptedModel", "PackedMatrices", "adapted_model"]


class PackedMatrices(Protocol):
    """An adapter's matrices in a model's own format."""

    @property
    def nbytes(self) -> int:
        """In memory."""


class AdaptedModel(Protocol):
    """
    Attributes:
        layers: inputs and outputs of the linear layers that can have an adapter, by their paths in the model.
        dtype: of their inputs.
    """

    layers: Mapping[str, tuple[int, int]]
    dtype: torch.dtype

    def pack(self, matrices: Mapping[str, Matrices]) -> Any:
        """The adapter, for `set_rows`: a `PackedMatrices`.  Called in another thread than forward passes."""

    def set_rows(self, adapters: Sequence[Any], num_tokens: Sequence[int]) -> None:
        """The adapters of the next forward pass's rows, each None or what `pack` has returned, and the rows' tokens.

        No adapters: no row has one.
        """


def adapted_model(model: Any, dtype: torch.dtype, trial: Callable[[], int]) -> AdaptedModel:
    """How `model`, on a CPU, runs rows with adapters; it computes the same as before for the others.

    Args:
        trial: runs the model over a few tokens, before the first request, and returns how many.
    """
    if isinstance(model, NativeDecoder):
        return NativeAdapters(model)
    from inflight.loading.forward.adapted_modules import AdaptedModules  # imports transformers

    return AdaptedModules(model, dtype, trial)
