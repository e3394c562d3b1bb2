"""AutoRound's checkpoints, which are packed as GPTQ's or AWQ's.

Cheng et al., Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs, arXiv:2309.05516
Format: https://github.com/intel/auto-round
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from inflight.loading.checkpoint.awq_format import AwqPacking
from inflight.loading.checkpoint.gptq_format import GptqPacking, expect_bits
from inflight.loading.load_errors import LoadError
from inflight.loading.quantization.packing import Header

__all__ = ["AutoRoundFormat"]

_GPTQ, _AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
_FIRST_ZEROS = {_GPTQ: 1, "auto_round": 0, "auto_round:gptqmodel": 0}  # is added to stored zero points
_WILD = re.compile(r"[*+?^$()\[\]{}|\\]")  # a name with one of these is a pattern


class _Config(msgspec.Struct):
    """The part of a quantization_config that says what its tensors mean."""

    bits: int
    group_size: int = 128
    sym: bool = True
    packing_format: str = _GPTQ
    data_type: str = "int"
    extra_config: dict[str, dict[str, Any]] | None = None


class _Layer(msgspec.Struct):
    """An entry of `extra_config`: what differs in the layers of this name."""

    bits: int | None = None
    group_size: int | None = None
    sym: bool | None = None


class AutoRoundFormat:
    """A `Format`: `quant_method` "auto-round".

    Raises:
        LoadError: `values` contains something else than the format has, or something that is not supported.
    """

    codes: tuple[str, ...] = ("qweight",)
    elsewhere: re.Pattern[str] | None = None

    def __init__(self, values: Mapping[str, Any]) -> None:
        try:
            self._config = msgspec.convert(dict(values), _Config)
            extra = self._config.extra_config or {}
            self._layers = {name: msgspec.convert(entry, _Layer) for name, entry in extra.items()}
            self._patterns = {re.compile(name): self._layers[name] for name in extra if _WILD.search(name)}
        except (msgspec.ValidationError, re.error) as error:
            raise LoadError(f"its quantization_config is not AutoRound's: {error}") from None
        if (kind := self._config.packing_format) not in (_AWQ, *_FIRST_ZEROS):
            supported = ", ".join(map(repr, (_AWQ, *_FIRST_ZEROS)))
            raise LoadError(f"it is packed as packing_format={kind!r} (supported: {supported})")
        if self._config.data_type != "int":
            raise LoadError(f"its codes have data_type={self._config.data_type!r} (supported: 'int')")
        expect_bits("its quantization_config", self._config.bits)

    def packing(self, name: str, found: Mapping[str, Header]) -> GptqPacking | AwqPacking | None:
        if "qweight" not in found:
            return None
        config, layer = self._config, self._layer(name)
        bits = config.bits if layer.bits is None else layer.bits
        group_size = config.group_size if layer.group_size is None else layer.group_size
        expect_bits(name, bits)
        if config.packing_format != _AWQ:
            symmetric = config.sym if layer.sym is None else layer.sym
            return GptqPacking(bits, group_size, symmetric, _FIRST_ZEROS[config.packing_format])
        if bits != 4:
            raise LoadError(f"{name} has codes of {bits} bits (supported in AWQ: 4)")
        return AwqPacking(group_size)

    def _layer(self, name: str) -> _Layer:
        if name in self._layers:
            return self._layers[name]
        return next((entry for pattern, entry in self._patterns.items() if pattern.search(name)), _Layer())
