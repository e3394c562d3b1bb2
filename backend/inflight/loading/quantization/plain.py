"""Weights in the model's dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from inflight.config import EngineConfig
from inflight.kernels.cpu.weight_format import UNCHANGED

__all__ = ["Plain"]


class Plain:
    """A `Scheme`: nothing is quantized.  The others differ in what they override."""

    name = "none"
    tolerance = 0.0
    cpu_formats = UNCHANGED
    needs_packing = False

    def check(self, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
        pass

    def bytes_saved(self, make_model: Callable[[], nn.Module], hf_config: Any, dtype: torch.dtype) -> int:
        return 0

    def place(self, model: nn.Module, hf_config: Any, device: torch.device, verify: bool) -> nn.Module:
        return model.to(device)
