"""GPTQ's format: integers along the inputs of a layer, zero points along its outputs, both packed into int32.

Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers, arXiv:2210.17323
Format: https://github.com/ModelCloud/GPTQModel
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor

from inflight.loading.load_errors import LoadError
from inflight.loading.quantization.packing import (
    DAMAGED,
    FLOATS,
    Header,
    checked,
    order_of,
    scales_of,
    unpacked,
)
from inflight.loading.quantization.stored_weight import StoredWeight

__all__ = ["GptqFormat", "GptqPacking", "expect_bits", "group_of"]

_FORMATS = ("gptq", "gptq_v2")
_BITS = (4, 8)


def expect_bits(where: str, bits: int) -> None:
    """
    Raises:
        LoadError: codes of so many bits are not supported.
    """
    if bits not in _BITS:
        raise LoadError(f"{where} has codes of {bits} bits (supported: 4 and 8)")


def group_of(name: str, group_size: int, num_inputs: int) -> int:
    """Inputs of a layer that share a scale; a `group_size` of -1 means all.

    Raises:
        LoadError: it does not divide the inputs.
    """
    group = num_inputs if group_size == -1 else group_size
    if group < 1 or num_inputs % group:
        raise LoadError(f"{name} has {num_inputs} inputs, which are not a multiple of group_size={group_size}")
    return group


@dataclass(frozen=True)
class GptqPacking:
    """A `Packing`: qweight [K / 8, N], qzeros [G, N / 8], scales [G, N], g_idx [K]; of 8 bits, K / 4 and N / 4.

    Attributes:
        first_zero: is added to stored zero points: 1, modulo 2**bits, but for "gptq_v2".
        symmetric: all zero points are 2**(bits - 1).
    """

    bits: int
    group_size: int
    symmetric: bool
    first_zero: int

    def tensors(self, name: str, size: tuple[int, int], found: Mapping[str, Header]) -> dict[str, Header]:
        num_outputs, num_inputs = size
        num_groups = num_inputs // group_of(name, self.group_size, num_inputs)
        words, zero_words = (-(-n * self.bits // 32) for n in (num_inputs, num_outputs))
        expected = {
            "qweight": checked(name, found, "qweight", ["I32"], [words, num_outputs]),
            "qzeros": checked(name, found, "qzeros", ["I32"], [num_groups, zero_words]),
            "scales": checked(name, found, "scales", FLOATS, [num_groups, num_outputs]),
        }
        if "g_idx" in found:
            expected["g_idx"] = checked(name, found, "g_idx", ["I32", "I64"], [num_inputs])
        return expected

    def weight(self, name: str, size: tuple[int, int], tensors: Mapping[str, Tensor]) -> StoredWeight:
        num_outputs, num_inputs = size
        group = group_of(name, self.group_size, num_inputs)
        half = 1 << self.bits - 1
        zeros = unpacked(tensors["qzeros"], self.bits, num_outputs) + self.first_zero & 2 * half - 1
        if self.symmetric and not bool((zeros == half).all()):
            raise LoadError(
                f"{name}.qzeros has zero points other than {half}, which its quantization_config excludes (sym): if it "
                'is right in saying so, checkpoint_format may have to be "gptq_v2", or "gptq"; else sym false'
            )
        codes = unpacked(tensors["qweight"].t(), self.bits, num_inputs)
        order = None
        if "g_idx" in tensors:
            order = order_of(f"{name}.g_idx", tensors["g_idx"], group)
        return StoredWeight(
            codes=codes.contiguous() if order is None else codes[:, order],
            bits=self.bits,
            group=group,
            scales=scales_of(f"{name}.scales", tensors["scales"].t()),
            zeros=zeros.t().contiguous(),
            order=order,
        )


class _Config(msgspec.Struct):
    """The part of a quantization_config that says what its tensors mean."""

    bits: int
    group_size: int = 128
    sym: bool = True
    checkpoint_format: str | None = None
    format: str | None = None
    is_marlin_format: bool = False
    pack_dtype: str = "int32"
    dynamic: dict[str, dict[str, Any]] | None = None


class _Rule(msgspec.Struct):
    """An entry of `dynamic`: changes for the layers that it matches."""

    bits: int | None = None
    group_size: int | None = None
    sym: bool | None = None


class GptqFormat:
    """A `Format`: `quant_method` "gptq".

    Raises:
        LoadError: `values` contains something else than the format has, or something that is not supported.
    """

    codes: tuple[str, ...] = ("qweight",)
    elsewhere: re.Pattern[str] | None = None

    def __init__(self, values: Mapping[str, Any]) -> None:
        try:
            config = msgspec.convert(dict(values), _Config)
            dynamic = config.dynamic or {}
            self._rules = [(_pattern(key), _excludes(key), msgspec.convert(dynamic[key], _Rule)) for key in dynamic]
        except (msgspec.ValidationError, re.error) as error:
            raise LoadError(f"its quantization_config is not GPTQ's: {error}") from None
        kind = "marlin" if config.is_marlin_format else (config.checkpoint_format or config.format or "gptq").lower()
        if kind not in _FORMATS:
            raise LoadError(f"it is packed as checkpoint_format={kind!r} (supported: {', '.join(map(repr, _FORMATS))})")
        if config.pack_dtype != "int32":
            raise LoadError(f"its codes are packed as pack_dtype={config.pack_dtype!r} (supported: 'int32')")
        expect_bits("its quantization_config", config.bits)
        self._all = _Rule(config.bits, config.group_size, config.sym)
        self._first_zero = 0 if kind == "gptq_v2" else 1

    def packing(self, name: str, found: Mapping[str, Header]) -> GptqPacking | None:
        if "qweight" not in found:
            return None
        rule = _Rule()
        for pattern, excludes, entry in self._rules:  # the first that matches
            if pattern.match(name):
                if excludes:
                    raise LoadError(f"{name}.qweight contains codes, and dynamic excludes the layer; {DAMAGED}")
                rule = entry
                break
        bits, group_size, symmetric = (
            own if own is not None else common
            for own, common in zip(msgspec.structs.astuple(rule), msgspec.structs.astuple(self._all))
        )
        expect_bits(name, bits)
        return GptqPacking(bits, group_size, symmetric, self._first_zero)


def _pattern(key: str) -> re.Pattern[str]:
    return re.compile(key[2:] if key.startswith(("-:", "+:")) else key)


def _excludes(key: str) -> bool:
    return key.startswith("-:")
