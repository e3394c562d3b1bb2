"""Integers in compressed-tensors' formats: packed into int32, or one in a byte.

Format: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from inflight.loading.checkpoint.gptq_format import expect_bits, group_of
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

__all__ = ["CompressedFormat", "CompressedPacking", "has_integers"]

_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision")
_UNUSED = -1  # in every element of a weight_g_idx: groups are contiguous
_STRATEGIES = ("group", "channel", "tensor")


@dataclass(frozen=True)
class CompressedPacking:
    """A `Packing`: weight_packed [N, K / 8], or `weight` [N, K]; weight_scale [N, G], weight_g_idx [K].

    Codes and zero points are signed; packed ones are stored plus 2**(bits - 1).

    Attributes:
        packed: codes are packed into int32; of 8 bits, four in one.
        strategy: weights that share a scale: a group of inputs, an output's ("channel"), or all ("tensor").
    """

    bits: int
    strategy: str
    group_size: int
    symmetric: bool
    packed: bool

    def tensors(self, name: str, size: tuple[int, int], found: Mapping[str, Header]) -> dict[str, Header]:
        num_outputs, num_inputs = size
        num_groups = num_inputs // self._group(name, num_inputs)
        words, zero_words = (-(-n * self.bits // 32) for n in (num_inputs, num_outputs))
        scales = [[num_outputs, num_groups]]
        if self.strategy == "channel":
            scales += [[num_outputs]]
        elif self.strategy == "tensor":
            scales = [[1], [], [1, 1]]
        expected = {"weight_scale": checked(name, found, "weight_scale", FLOATS, *scales)}
        if self.packed:
            expected["weight_packed"] = checked(name, found, "weight_packed", ["I32"], [num_outputs, words])
            expected["weight_shape"] = checked(name, found, "weight_shape", ["I64", "I32"], [2])
        else:
            expected["weight"] = checked(name, found, "weight", ["I8"], [num_outputs, num_inputs])
        if "weight_zero_point" in found or not self.symmetric:
            is_packed = self.packed and found.get("weight_zero_point", Header("I32", ())).dtype == "I32"
            shapes = [[zero_words, num_groups]] if is_packed else scales
            dtype = "I32" if is_packed else "I8"
            expected["weight_zero_point"] = checked(name, found, "weight_zero_point", [dtype], *shapes)
        if "weight_g_idx" in found:
            expected["weight_g_idx"] = checked(name, found, "weight_g_idx", ["I32", "I64"], [num_inputs])
        return expected

    def weight(self, name: str, size: tuple[int, int], tensors: Mapping[str, Tensor]) -> StoredWeight:
        num_outputs, num_inputs = size
        group = self._group(name, num_inputs)
        if self.packed:
            shape = tensors["weight_shape"].tolist()
            if shape != list(size):
                raise LoadError(f"{name}.weight_shape is {shape}, and its config.json implies {list(size)}")
            codes = unpacked(tensors["weight_packed"], self.bits, num_inputs)
        else:
            codes = self._unsigned(f"{name}.weight", tensors["weight"])
        order, groups = None, tensors.get("weight_g_idx")
        if groups is not None and bool((groups != _UNUSED).any()):
            order = order_of(f"{name}.weight_g_idx", groups, group)
        scales = scales_of(f"{name}.weight_scale", tensors["weight_scale"])
        num_groups = num_inputs // group
        return StoredWeight(
            codes=codes.contiguous() if order is None else codes[:, order],
            bits=self.bits,
            group=group,
            scales=_of_each(scales, num_outputs, num_groups),
            zeros=_of_each(self._zeros(name, tensors, num_outputs), num_outputs, num_groups),
            order=order,
        )

    def _group(self, name: str, num_inputs: int) -> int:
        return group_of(name, self.group_size if self.strategy == "group" else -1, num_inputs)

    def _zeros(self, name: str, tensors: Mapping[str, Tensor], num_outputs: int) -> Tensor:
        """uint8 [N, G], or of one number."""
        stored = tensors.get("weight_zero_point")
        if stored is None:
            return torch.tensor([1 << self.bits - 1], dtype=torch.uint8)
        if stored.dtype == torch.int32:
            zeros = unpacked(stored.t(), self.bits, num_outputs).t()
        else:
            zeros = self._unsigned(f"{name}.weight_zero_point", stored)
        if self.symmetric and not bool((zeros == 1 << self.bits - 1).all()):
            raise LoadError(f"{name}.weight_zero_point is not zero, which its config_groups exclude (symmetric)")
        return zeros

    def _unsigned(self, name: str, signed: Tensor) -> Tensor:
        """int8 -> uint8, plus 2**(bits - 1)"""
        half = 1 << self.bits - 1
        low, high = int(signed.min()), int(signed.max())
        if low < -half or high >= half:
            raise LoadError(f"{name} contains {low if low < -half else high}, which {self.bits} bits cannot; {DAMAGED}")
        return (signed.to(torch.int16) + half).to(torch.uint8)


def _of_each(numbers: Tensor, num_outputs: int, num_groups: int) -> Tensor:
    """[N, G], from that or one number for each output or for all."""
    wide = numbers.reshape(-1, 1) if numbers.dim() < 2 else numbers
    return wide.expand(num_outputs, num_groups).contiguous()


class _Weights(msgspec.Struct):
    """How the weights of a group of layers are quantized."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None


class _Group(msgspec.Struct):
    """An entry of `config_groups`.  How inputs are quantized is not used: here each row has scales of its own."""

    targets: list[str]
    weights: _Weights | None = None
    format: str | None = None


class _Config(msgspec.Struct):
    """The part of a quantization_config that says what its tensors mean."""

    config_groups: dict[str, _Group]
    format: str | None = None


class CompressedFormat:
    """A `Format`: `quant_method` "compressed-tensors", weights of type "int".

    Raises:
        LoadError: `values` contains something else than the format has, or something that is not supported.
    """

    codes: tuple[str, ...] = ("weight_packed",)
    elsewhere: re.Pattern[str] | None = re.compile(
        r"\.input_(scale|zero_point)$"
    )  # here the scales of inputs are dynamic

    def __init__(self, values: Mapping[str, Any]) -> None:
        sparse = values.get("sparsity_config")
        if sparse and (not isinstance(sparse, dict) or sparse.get("format", "dense") != "dense"):
            kind = sparse.get("format") if isinstance(sparse, dict) else sparse
            raise LoadError(f"its weights are stored as sparse: format={kind!r}")
        if values.get("transform_config"):
            raise LoadError("it has a transform_config, whose rotations of weights and inputs are not supported")
        try:
            config = msgspec.convert(dict(values), _Config)
            self._groups = [
                ([_target(target) for target in group.targets], _packing(name, group, config.format))
                for name, group in config.config_groups.items()
            ]
        except (msgspec.ValidationError, re.error) as error:
            raise LoadError(f"its quantization_config is not compressed-tensors': {error}") from None

    def packing(self, name: str, found: Mapping[str, Header]) -> CompressedPacking | None:
        is_packed = "weight_packed" in found
        if not is_packed and ("weight" not in found or found["weight"].dtype != "I8"):
            return None
        for targets, packing in self._groups:
            if any(target.match(name) for target in targets):
                return replace(packing, packed=is_packed)
        raise LoadError(f"{name} is stored in codes, and none of its config_groups has it among its targets")


def _target(target: str) -> re.Pattern[str]:
    """The beginning of the names of its layers: it is a pattern, the class of all linear layers, or a layer's name."""
    if target.startswith("re:"):
        return re.compile(target.removeprefix("re:"))
    return re.compile("" if target == "Linear" else rf"{re.escape(target)}\Z")


def _packing(name: str, group: _Group, common_format: str | None) -> CompressedPacking:
    """
    Raises:
        LoadError: an entry of `config_groups` is not supported.
    """
    where, weights = f"its config group {name!r}", group.weights
    if weights is None:
        raise LoadError(f"{where} has no weights")
    kind = group.format or common_format
    if kind not in _FORMATS:
        raise LoadError(f"{where} is compressed as format={kind!r} (supported: {', '.join(map(repr, _FORMATS))})")
    strategy = weights.strategy or ("tensor" if weights.group_size is None else "group")
    if strategy not in _STRATEGIES:
        raise LoadError(f"{where} has strategy={strategy!r} (supported: {', '.join(map(repr, _STRATEGIES))})")
    expect_bits(where, weights.num_bits)
    group_size = -1 if weights.group_size is None else weights.group_size
    return CompressedPacking(weights.num_bits, strategy, group_size, weights.symmetric, packed=True)


def has_integers(values: Mapping[str, Any]) -> bool:
    """Whether some weights are integers.

    Raises:
        LoadError: and others are floating-point numbers of eight bits or less.
    """
    groups = values.get("config_groups")
    schemes = groups.values() if isinstance(groups, dict) else []
    weights = [scheme.get("weights") for scheme in schemes if isinstance(scheme, dict)]
    kinds = {str(each.get("type", "int")) for each in weights if isinstance(each, dict)}
    if len(kinds) > 1:
        raise LoadError("its config_groups quantize some weights to integers and others to floating-point numbers")
    return kinds == {"int"}
