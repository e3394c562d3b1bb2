"""Weights in e4m3 with one scale per output channel, inputs in e4m3 with one per row: on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from inflight.config import ConfigError, EngineConfig
from inflight.loading.quantization import fp8_linear
from inflight.loading.quantization.plain import Plain

__all__ = ["Fp8"]


class Fp8(Plain):
    """A `Scheme`.  The check at load compares with weights that are rounded already, so the tolerance stays."""

    name = "fp8"

    def check(self, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
        if (why := fp8_linear.unsupported(device, dtype)) is not None:
            way_out = 'set it to "int8"' if device.type == "cpu" else "remove it"
            raise ConfigError(f'quantization="fp8" cannot be used: {why}; {way_out}')

    def bytes_saved(self, make_model: Callable[[], nn.Module], hf_config: Any, dtype: torch.dtype) -> int:
        linears = fp8_linear.decoder_linears(make_model(), hf_config).values()
        return sum(linear.weight.numel() for linear in linears if fp8_linear.fits(linear)) * (dtype.itemsize - 1)

    def place(self, model: nn.Module, hf_config: Any, device: torch.device, verify: bool) -> nn.Module:
        return fp8_linear.quantize_linears(model, hf_config, device, verify)
