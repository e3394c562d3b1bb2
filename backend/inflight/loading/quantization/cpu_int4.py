"""Weights in four bits with a scale and a min per 32 inputs, inputs in eight bits: on a CPU."""

from __future__ import annotations

import torch

from inflight.config import ConfigError, EngineConfig
from inflight.kernels.cpu.weight_format import FINE_INT8, INT4, Formats
from inflight.loading.quantization.plain import Plain

__all__ = ["CpuInt4"]


class CpuInt4(Plain):
    """A `Scheme`.  Weights are loaded in the model's dtype, and quantized layer by layer when they are packed.

    The head has eight bits: it is where an error costs the most, and a quarter of a small model.
    """

    name = "int4"
    tolerance = 0.6
    cpu_formats = Formats(layers=INT4, head=FINE_INT8)
    needs_packing = True

    def check(self, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
        if not config.native_forward:
            raise ConfigError('quantization="int4" requires native_forward on a CPU; remove one of them')
