"""The seam for models that compute some rows with adapters (LoRA), and the choice of an answer for a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from inflight.config import EngineConfig
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
        max_adapters: that the rows of a step can have; None: any number.
        nbytes: that it has allocated on the device for adapters.
        capturable: whether a CUDA graph can contain passes with adapters: see `StepHook`.
    """

    layers: Mapping[str, tuple[int, int]]
    dtype: torch.dtype
    max_adapters: int | None
    nbytes: int
    capturable: bool

    def pack(self, matrices: Mapping[str, Matrices], pause: Callable[[], None]) -> Any:
        """The adapter, for `set_rows`: a `PackedMatrices`.  Called in another thread than forward passes.

        Args:
            pause: called after each millisecond of work, more or less; it waits while forward passes need the cores.

        Raises:
            AdapterError: matrices contain NaN or infinity.
        """

    def set_rows(self, adapters: Sequence[Any], num_tokens: Sequence[int]) -> None:
        """The adapters of the next forward pass's rows, each None or what `pack` has returned, and the rows' tokens.

        No adapters: no row has one.
        """

    def expect(self, num_tokens: int) -> None:
        """On a GPU, the next pass, which may be one that is captured, is over so many tokens with adapters; 0: without.

        So a pass without adapters launches nothing for them.
        """


def adapted_model(
    config: EngineConfig, model: Any, dtype: torch.dtype, device: torch.device, trial: Callable[[], int]
) -> AdaptedModel:
    """How `model` runs rows with adapters; it computes the same as before for the others.

    Args:
        trial: runs the model over a few tokens, before the first request, and returns how many.

    Raises:
        LoadError: it cannot.
    """
    if device.type != "cpu":
        from inflight.loading.forward.device_adapters import DeviceAdapters  # imports transformers

        sizes = config.num_device_adapters, config.max_lora_rank, config.step_tokens
        on_device = DeviceAdapters(model, dtype, device, *sizes, trial)
        if config.check_on_load:
            on_device.verify()
        return on_device
    if isinstance(model, NativeDecoder):
        return NativeAdapters(model)
    from inflight.loading.forward.adapted_modules import AdaptedModules  # imports transformers

    return AdaptedModules(model, dtype, trial)
