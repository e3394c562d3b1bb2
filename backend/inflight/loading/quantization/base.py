"""The Protocol of a quantization scheme."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from inflight.config import EngineConfig
from inflight.kernels.cpu.weight_format import Formats

__all__ = ["Scheme"]


class Scheme(Protocol):
    """How the weights of linear layers are stored, from the moment they are read to the kernel that multiplies them.

    Attributes:
        name: value of `quantization` in model.json.
        tolerance: relative error of the logits that rounding of weights and inputs explains; 0 for none beyond the
            dtype's.
        cpu_formats: how the packed layers of a CPU store weights.
        needs_packing: whether a model whose layers cannot be packed on a CPU is refused, rather than served by torch.
    """

    name: str
    tolerance: float
    cpu_formats: Formats
    needs_packing: bool

    def check(self, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
        """
        Raises:
            ConfigError: `device` cannot compute with such weights.
        """

    def bytes_saved(self, make_model: Callable[[], nn.Module], hf_config: Any, dtype: torch.dtype) -> int:
        """Bytes that weights take less than in `dtype` while they are loaded.

        Args:
            make_model: the model that config.json describes, without memory; takes a moment.
        """

    def place(self, model: nn.Module, hf_config: Any, device: torch.device, verify: bool) -> nn.Module:
        """`model`, read in its dtype, on `device`; its linear layers are quantized on the way where that saves memory.

        Args:
            verify: compare a few products with those of the plain weights.

        Raises:
            LoadError: nothing can be quantized, or a product is wrong on this device.
        """
