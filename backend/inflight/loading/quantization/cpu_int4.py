"""Weights in four bits with a scale and a min per 32 inputs, inputs in eight bits: on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from inflight.config import ConfigError, EngineConfig
from inflight.kernels.cpu.weight_format import FINE_INT8, INT4, Formats, WeightFormat
from inflight.load_phases import enter_phase
from inflight.loading.quantization.coded_linear import ROUNDED_INPUTS, layers_in, quantise
from inflight.loading.quantization.input_squares import mean_squares
from inflight.loading.quantization.plain import Plain

__all__ = ["CpuInt4"]


class CpuInt4(Plain):
    """A `Scheme`.  Weights are loaded in the model's dtype, and quantized layer by layer as soon as all are read.

    So the check at load compares with weights as their codes say.  The head has more bits: it is where an error costs
    the most, and a quarter of a small model.
    """

    name = "int4"
    tolerance = ROUNDED_INPUTS
    needs_packing = True

    def __init__(self, head: WeightFormat = FINE_INT8, measures: bool = True) -> None:
        """
        Args:
            measures: errors weigh as much as inputs are large; random weights do not tell.
        """
        self.cpu_formats = Formats(layers=INT4, head=head)
        self._measures = measures

    def check(self, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
        if not config.native_forward:
            raise ConfigError('quantization="int4" requires native_forward on a CPU; remove one of them')

    def place(self, model: nn.Module, hf_config: Any, device: torch.device, verify: bool) -> nn.Module:
        formats = layers_in(model, self.cpu_formats) if self._measures else {}
        weighed = [name for name, (_, format) in formats.items() if format.weighs_inputs]
        importance = mean_squares(model, weighed, hf_config.get_text_config(decoder=True))
        enter_phase("quantizing the weights")
        quantise(model, self.cpu_formats, importance)
        return model.to(device)
