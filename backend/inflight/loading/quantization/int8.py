"""Weights in int8 with one scale per output feature, inputs in int8 with one per row: on a CPU."""

from __future__ import annotations

import torch
from torch import nn

from inflight.config import ConfigError, EngineConfig
from inflight.kernels.cpu.weight_format import INT8, WeightFormat
from inflight.loading.quantization.plain import Plain

__all__ = ["Int8"]


class Int8(Plain):
    """A `Scheme`.  Weights are loaded in the model's dtype, and quantized layer by layer when they are packed."""

    name = "int8"
    tolerance = 0.25
    cpu_format: WeightFormat = INT8
    needs_packing = True

    def check(self, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
        if device.type != "cpu" or not config.native_forward:
            raise ConfigError('quantization="int8" requires a CPU and native_forward; remove it')

    def unsupported(self, model: nn.Module) -> str | None:
        """Why the sums of products of a layer would overflow."""
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and (why := INT8.unsupported(module.in_features)) is not None:
                return f"{name} has {why}"
        return None
