"""The choice of a quantization scheme."""

from __future__ import annotations

from inflight.config import STORED, EngineConfig
from inflight.loading.quantization.base import Scheme
from inflight.loading.quantization.cpu_int4 import CpuInt4
from inflight.loading.quantization.fp8 import Fp8
from inflight.loading.quantization.int4 import Int4
from inflight.loading.quantization.int8 import Int8
from inflight.loading.quantization.plain import Plain

__all__ = ["scheme_of"]

_SCHEMES: dict[str | None, Scheme] = {None: Plain(), "int8": Int8(), "fp8": Fp8(), "int4": Int4()}
_ON_A_CPU: dict[str | None, Scheme] = {"int4": CpuInt4()}


def scheme_of(config: EngineConfig) -> Scheme:
    """The scheme that `quantization` in model.json asks for; the name of how a checkpoint is stored asks for none."""
    name = None if config.quantization in STORED else config.quantization
    return _ON_A_CPU.get(name, _SCHEMES[name]) if config.device == "cpu" else _SCHEMES[name]
