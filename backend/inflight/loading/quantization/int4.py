"""Weights in int4 with a scale and a min per 32 inputs, inputs in 16 bits: on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from inflight.config import ConfigError, EngineConfig
from inflight.loading.quantization import int4_linear, int4_search
from inflight.loading.quantization.fp8_linear import decoder_linears
from inflight.loading.quantization.plain import Plain

__all__ = ["Int4"]


class Int4(Plain):
    """A `Scheme`.  The check at load compares with weights that are rounded already, so the tolerance stays."""

    name = "int4"

    def check(self, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
        if (why := int4_linear.unsupported(device, dtype)) is not None:
            raise ConfigError(f'quantization="int4" cannot be used: {why}; remove it')

    def bytes_saved(self, make_model: Callable[[], nn.Module], hf_config: Any, dtype: torch.dtype) -> int:
        weights = [linear.weight for linear in decoder_linears(make_model(), hf_config).values()]
        fitting = [weight for weight in weights if int4_linear.fits(weight.shape[1])]
        return sum(weight.numel() * dtype.itemsize - int4_search.bytes_of(*weight.shape) for weight in fitting)

    def place(self, model: nn.Module, hf_config: Any, device: torch.device, verify: bool) -> nn.Module:
        return int4_linear.quantize_linears(model, hf_config, device, verify)
