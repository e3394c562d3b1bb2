"""The choice of a quantization scheme."""

from __future__ import annotations

import torch

from inflight.config import STORED, ConfigError, EngineConfig
from inflight.kernels.cpu.weight_format import FINE_INT8, INT4, INT6, PLAIN, WeightFormat
from inflight.loading.quantization.base import Scheme
from inflight.loading.quantization.cpu_int4 import CpuInt4
from inflight.loading.quantization.fp8 import Fp8
from inflight.loading.quantization.int4 import Int4
from inflight.loading.quantization.int8 import Int8
from inflight.loading.quantization.plain import Plain

__all__ = ["check_scheme", "scheme_of"]

_DEFAULT_HEAD_BITS = 8

_SCHEMES: dict[str | None, Scheme] = {None: Plain(), "int8": Int8(), "fp8": Fp8()}
_WITH_HEAD_BITS = ("int8", "int4")
_HEADS: dict[int, WeightFormat] = {4: INT4, 6: INT6, 8: FINE_INT8, 16: PLAIN}


def scheme_of(config: EngineConfig) -> Scheme:
    """The scheme that `quantization` in model.json asks for; the name of how a checkpoint is stored asks for none."""
    name = None if config.quantization in STORED else config.quantization
    measures = config.load_format == "auto"  # not of random weights
    if config.device == "cpu" and name in _WITH_HEAD_BITS:
        head = _HEADS[config.head_bits or _DEFAULT_HEAD_BITS]
        return Int8(head) if name == "int8" else CpuInt4(head, measures)
    return Int4(measures) if name == "int4" else _SCHEMES[name]


def check_scheme(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
    """
    Raises:
        ConfigError: `device` cannot compute with weights as `quantization` and `head_bits` say.
    """
    if config.head_bits is not None and (device.type != "cpu" or config.quantization not in _WITH_HEAD_BITS):
        raise ConfigError(
            f'head_bits={config.head_bits} is for quantization="int8" or "int4" on a CPU, and elsewhere the head stays '
            "as it is; remove it"
        )
    scheme_of(config).check(config, device, dtype)
