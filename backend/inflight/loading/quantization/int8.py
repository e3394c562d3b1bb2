"""Weights in eight bits with a scale per output feature, inputs with one per row and group: on a CPU."""

from __future__ import annotations

import torch

from inflight.config import ConfigError, EngineConfig
from inflight.kernels.cpu.weight_format import FINE_INT8, INT8, Formats, WeightFormat
from inflight.loading.quantization.plain import Plain

__all__ = ["Int8"]


class Int8(Plain):
    """A `Scheme`.  Weights are loaded in the model's dtype, and quantized layer by layer when they are packed."""

    name = "int8"
    tolerance = 0.25
    needs_packing = True

    def __init__(self, head: WeightFormat = FINE_INT8) -> None:
        self.cpu_formats = Formats(INT8, head)

    def check(self, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
        if device.type != "cpu" or not config.native_forward:
            raise ConfigError('quantization="int8" requires a CPU and native_forward; remove it')
