"""AWQ's format, version gemm: integers of 4 bits along the outputs of a layer, interleaved, packed into int32.

Lin et al., AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration, arXiv:2306.00978
Format: https://github.com/casper-hansen/AutoAWQ
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor

from inflight.loading.checkpoint.gptq_format import group_of
from inflight.loading.load_errors import LoadError
from inflight.loading.quantization.packing import FLOATS, Header, checked, scales_of, unpacked
from inflight.loading.quantization.stored_weight import StoredWeight

__all__ = ["AwqFormat", "AwqPacking"]

_PER_WORD = 8
# Output 8c + j is in the four bits of this place of word c, counted from the lowest.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class AwqPacking:
    """A `Packing`: qweight [K, N / 8], qzeros [G, N / 8], scales [G, N]."""

    group_size: int

    def tensors(self, name: str, size: tuple[int, int], found: Mapping[str, Header]) -> dict[str, Header]:
        num_outputs, num_inputs = size
        num_groups = num_inputs // group_of(name, self.group_size, num_inputs)
        if num_outputs % _PER_WORD:
            raise LoadError(f"{name} has {num_outputs} outputs, which are not a multiple of {_PER_WORD}")
        words = num_outputs // _PER_WORD
        return {
            "qweight": checked(name, found, "qweight", ["I32"], [num_inputs, words]),
            "qzeros": checked(name, found, "qzeros", ["I32"], [num_groups, words]),
            "scales": checked(name, found, "scales", FLOATS, [num_groups, num_outputs]),
        }

    def weight(self, name: str, size: tuple[int, int], tensors: Mapping[str, Tensor]) -> StoredWeight:
        num_outputs, num_inputs = size
        return StoredWeight(
            codes=_in_order(tensors["qweight"], num_outputs).t().contiguous(),
            bits=4,
            group=group_of(name, self.group_size, num_inputs),
            scales=scales_of(f"{name}.scales", tensors["scales"].t()),
            zeros=_in_order(tensors["qzeros"], num_outputs).t().contiguous(),
        )


def _in_order(words: Tensor, num_outputs: int) -> Tensor:
    """int32 [R, N / 8] -> uint8 [R, N]"""
    codes = unpacked(words, 4, num_outputs)
    return codes.view(len(words), -1, _PER_WORD)[..., list(_PLACES)].flatten(1)


class _Config(msgspec.Struct):
    """The part of a quantization_config that says what its tensors mean; the tools that write it differ in names."""

    bits: int | None = None
    w_bit: int | None = None
    group_size: int | None = None
    q_group_size: int | None = None
    version: str | None = None
    format: str | None = None
    checkpoint_format: str | None = None
    backend: str | None = None
    pack_dtype: str = "int32"


class AwqFormat:
    """A `Format`: `quant_method` "awq".

    Raises:
        LoadError: `values` contains something else than the format has, or something that is not supported.
    """

    codes: tuple[str, ...] = ("qweight",)
    elsewhere: re.Pattern[str] | None = None

    def __init__(self, values: Mapping[str, Any]) -> None:
        try:
            config = msgspec.convert(dict(values), _Config)
        except msgspec.ValidationError as error:
            raise LoadError(f"its quantization_config is not AWQ's: {error}") from None
        version = (config.version or config.checkpoint_format or config.format or "gemm").lower()
        if config.backend == "llm-awq":
            version = config.backend
        if version != "gemm":
            raise LoadError(f"it is packed as version={version!r} (supported: 'gemm')")
        if config.pack_dtype != "int32":
            raise LoadError(f"its codes are packed as pack_dtype={config.pack_dtype!r} (supported: 'int32')")
        bits = config.bits or config.w_bit or 4
        if bits != 4:
            raise LoadError(f"its quantization_config has codes of {bits} bits (supported in AWQ: 4)")
        self._packing = AwqPacking(config.group_size or config.q_group_size or 128)

    def packing(self, name: str, found: Mapping[str, Header]) -> AwqPacking | None:
        return self._packing if "qweight" in found else None
