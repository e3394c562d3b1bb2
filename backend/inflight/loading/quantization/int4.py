"""Weights in int4 with a scale and a min per 32 inputs, inputs in 16 bits: on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from inflight.config import ConfigError, EngineConfig
from inflight.kernels.cpu.library import unavailable
from inflight.load_phases import enter_phase
from inflight.loading.quantization import int4_linear
from inflight.loading.quantization.input_squares import mean_squares
from inflight.loading.quantization.plain import Plain

__all__ = ["Int4"]


class Int4(Plain):
    """A `Scheme`.  The check at load compares with weights that are rounded already, so the tolerance stays."""

    name = "int4"

    def __init__(self, measures: bool = True) -> None:
        """
        Args:
            measures: errors weigh as much as inputs are large; random weights do not tell.
        """
        self._measures = measures

    def check(self, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
        if (why := int4_linear.unsupported(device, dtype) or unavailable()) is not None:
            raise ConfigError(f'quantization="int4" cannot be used: {why}; remove it')

    def bytes_saved(self, make_model: Callable[[], nn.Module], hf_config: Any, dtype: torch.dtype) -> int:
        weights = [linear.weight for linear in int4_linear.fitting_linears(make_model(), hf_config).values()]
        return sum(weight.numel() * dtype.itemsize - int4_linear.bytes_of(*weight.shape) for weight in weights)

    def place(self, model: nn.Module, hf_config: Any, device: torch.device, verify: bool) -> nn.Module:
        names = list(int4_linear.fitting_linears(model, hf_config)) if self._measures else []
        importance = mean_squares(model, names, hf_config.get_text_config(decoder=True))
        enter_phase("quantizing the weights")
        return int4_linear.quantize_linears(model, hf_config, importance, device, verify)
