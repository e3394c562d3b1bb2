"""Checkpoints of bitsandbytes: NF4 or FP4 with a scale for each block of numbers, or LLM.int8.

Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, arXiv:2305.14314
Dettmers et al., LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale, arXiv:2208.07339
Format: https://github.com/bitsandbytes-foundation/bitsandbytes
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from inflight.loading.load_errors import LoadError
from inflight.loading.quantization.packing import DAMAGED, Header, checked, scales_of
from inflight.loading.quantization.stored_weight import CodebookWeight, StoredWeight

__all__ = ["BitsAndBytesFormat", "CodebookPacking", "RowsPacking"]

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_MAX_STATE_BYTES = 4096
_MAX_BLOCK = 2**31 - 1
_LEVELS, _NESTED_LEVELS = 16, 256
_ROWS = 0  # of `weight_format`: the others are orders of elements for old cards


class _State(msgspec.Struct):
    """The tensor `quant_state`, which contains JSON; nested keys describe scales in eight bits."""

    blocksize: int
    shape: tuple[int, int]
    nested_blocksize: int | None = None
    nested_offset: float = 0.0


@dataclass(frozen=True)
class CodebookPacking:
    """A `Packing`: weight [N * K / 2, 1] of indices; weight.quant_map, the 16 numbers; weight.absmax, of each block.

    Double quantisation stores absmax in eight bits, as indices of nested_quant_map, times nested_absmax of a block
    of scales, plus nested_offset.
    """

    state: str
    is_nested: bool

    def tensors(self, name: str, size: tuple[int, int], found: Mapping[str, Header]) -> dict[str, Header]:
        num_bytes = -(-math.prod(size) // 2)
        expected = {
            "weight": checked(name, found, "weight", ["U8"], [num_bytes, 1], [1, num_bytes]),
            "weight.quant_map": checked(name, found, "weight.quant_map", ["F32"], [_LEVELS]),
        }
        for tensor, dtype in self._sized():
            # How many there are follows from numbers in the tensor `quant_state`.
            expected[tensor] = checked(name, found, tensor, [dtype], found.get(tensor, Header("", ())).shape)
            if len(expected[tensor].shape) != 1 or expected[tensor].shape[0] > num_bytes + _MAX_STATE_BYTES:
                raise LoadError(f"{name}.{tensor} has shape {list(expected[tensor].shape)}; {DAMAGED}")
        if self.is_nested:
            tensor = "weight.nested_quant_map"
            expected[tensor] = checked(name, found, tensor, ["F32"], [_NESTED_LEVELS])
        return expected

    def weight(self, name: str, size: tuple[int, int], tensors: Mapping[str, Tensor]) -> CodebookWeight:
        state = self._read(name, size, tensors[self.state])
        num_blocks = -(-math.prod(size) // state.blocksize)
        absmax = _expect_length(name, tensors, "weight.absmax", num_blocks)
        if self.is_nested:
            assert state.nested_blocksize is not None
            num_nested = -(-num_blocks // state.nested_blocksize)
            nested = scales_of(
                f"{name}.weight.nested_absmax", _expect_length(name, tensors, "weight.nested_absmax", num_nested)
            )
            absmax = tensors["weight.nested_quant_map"][absmax.int()]
            absmax = absmax * nested[torch.arange(num_blocks) // state.nested_blocksize] + state.nested_offset
        levels = scales_of(f"{name}.weight.quant_map", tensors["weight.quant_map"])
        scales = scales_of(f"{name}.weight.absmax", absmax)
        return CodebookWeight(tensors["weight"].flatten(), levels, scales, state.blocksize, size)

    def _sized(self) -> list[tuple[str, str]]:
        """Tensors with as many numbers as a configuration says, and their dtypes."""
        if not self.is_nested:
            return [("weight.absmax", "F32"), (self.state, "U8")]
        return [("weight.absmax", "U8"), ("weight.nested_absmax", "F32"), (self.state, "U8")]

    def _read(self, name: str, size: tuple[int, int], data: Tensor) -> _State:
        try:
            state = msgspec.json.decode(bytes(data.tolist()), type=_State)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise LoadError(f"{name}.{self.state} is not readable: {error}; {DAMAGED}") from None
        if state.shape != size:
            raise LoadError(
                f"{name}.{self.state} says that the weight has shape {list(state.shape)}, and its config.json implies "
                f"{list(size)}"
            )
        sizes = [state.blocksize] if state.nested_blocksize is None else [state.blocksize, state.nested_blocksize]
        is_complete = len(sizes) > self.is_nested and math.isfinite(state.nested_offset)
        if not is_complete or not all(0 < n <= _MAX_BLOCK for n in sizes):
            raise LoadError(f"{name}.{self.state} has blocks of {sizes} and nested_offset={state.nested_offset}")
        return state


def _expect_length(name: str, tensors: Mapping[str, Tensor], tensor: str, length: int) -> Tensor:
    found = tensors[tensor]
    if len(found) != length:
        raise LoadError(f"{name}.{tensor} has {len(found)} numbers, and the weight {length} blocks; {DAMAGED}")
    return found


@dataclass(frozen=True)
class RowsPacking:
    """A `Packing` of LLM.int8: weight int8 [N, K]; SCB [N], the largest of each output, which is stored as 127."""

    def tensors(self, name: str, size: tuple[int, int], found: Mapping[str, Header]) -> dict[str, Header]:
        expected = {
            "weight": checked(name, found, "weight", ["I8"], size),
            "SCB": checked(name, found, "SCB", ["F32"], [size[0]]),
        }
        if "weight_format" in found:
            expected["weight_format"] = checked(name, found, "weight_format", ["U8"], [], [1])
        return expected

    def weight(self, name: str, size: tuple[int, int], tensors: Mapping[str, Tensor]) -> StoredWeight:
        if "weight_format" in tensors and (order := int(tensors["weight_format"])) != _ROWS:
            raise LoadError(f"{name}.weight_format is {order}, an order of elements that is not supported")
        return StoredWeight(
            codes=(tensors["weight"].to(torch.int16) + 128).to(torch.uint8),
            bits=8,
            group=size[1],
            scales=scales_of(f"{name}.SCB", tensors["SCB"])[:, None] / 127,
            zeros=torch.full((size[0], 1), 128, dtype=torch.uint8),
        )


class BitsAndBytesFormat:
    """A `Format`: `quant_method` "bitsandbytes"; the tensors say the rest."""

    codes: tuple[str, ...] = ("SCB", "absmax")
    elsewhere: re.Pattern[str] | None = re.compile(
        r"\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+)$"
    )

    def packing(self, name: str, found: Mapping[str, Header]) -> CodebookPacking | RowsPacking | None:
        if "SCB" in found:
            return RowsPacking()
        if "weight.absmax" not in found:
            return None
        state = next((state for state in _STATES if state in found), None)
        if state is None:
            raise LoadError(f"{name}.weight.quant_state, which says how it is stored, is in none of its files")
        return CodebookPacking(state, "weight.nested_absmax" in found)
