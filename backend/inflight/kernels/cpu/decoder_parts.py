"""A decoder's tables as plain values and tensors, and back: what a file can hold of them.

Nothing here knows how weights are packed: a `PackedWeight` is its attributes, and each pointer of its struct leads to
one of its tensors or to another such weight, or is null.  So a new format of weights needs no change here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from inflight.kernels.cpu.cpu_decoder import DecoderTables, LayerTables
from inflight.kernels.cpu.cpu_linear import LinearStruct, PackedWeight

__all__ = ["decoder_of_parts", "parts_of_decoder"]

_ADDRESS = "attention"  # of a layer's KV cache, which each process has elsewhere
_PLAIN = (bool, int, float, str, type(None))


def parts_of_decoder(tables: DecoderTables) -> tuple[dict[str, Any], list[Tensor]]:
    """Values of msgpack's own types, and the tensors; a value refers to one by its number.

    Raises:
        TypeError: a table has a part of another kind.
    """
    tensors: list[Tensor] = []
    values = _fields_of(tables, tensors)
    values["layers"] = [_fields_of(layer, tensors) for layer in tables.layers]
    return values, tensors


def decoder_of_parts(values: dict[str, Any], tensors: Sequence[Tensor], attention: Sequence[int]) -> DecoderTables:
    """The tables again.

    Args:
        values, tensors: as `parts_of_decoder` returns them.  The tables refer to the tensors.
        attention: addresses of the layers' descriptions, see `CpuKVCache`.

    Raises:
        TypeError, KeyError: they are tables of another version.
    """
    layers = [
        LayerTables(**{**_thawed(layer, tensors), _ADDRESS: address})
        for layer, address in zip(values["layers"], attention, strict=True)
    ]
    return DecoderTables(layers, **_thawed({k: v for k, v in values.items() if k != "layers"}, tensors))


def _fields_of(table: DecoderTables | LayerTables, tensors: list[Tensor]) -> dict[str, Any]:
    names = [field.name for field in fields(table) if field.name not in (_ADDRESS, "layers")]
    return {name: _frozen(getattr(table, name), tensors) for name in names}


def _frozen(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, PackedWeight):
        return {"packed": _packed_parts(value, tensors)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple)) and all(isinstance(item, _PLAIN) for item in value):
        return list(value)
    if not isinstance(value, _PLAIN):
        raise TypeError(f"a {type(value).__name__} cannot be kept")
    return value


def _packed_parts(weight: PackedWeight, tensors: list[Tensor]) -> dict[str, Any]:
    attributes = {name: value for name, value in vars(weight).items() if name not in ("struct", "address")}
    names = {address: name for name, value in attributes.items() if (address := _address(value))}
    struct: dict[str, Any] = {}
    for name, kind, *_ in LinearStruct._fields_:
        value = getattr(weight.struct, name)
        if kind is ctypes.c_void_p and value:
            if value not in names:
                raise TypeError(f"the pointer {name} of a packed weight leads to no part of it")
            value = names[value]
        struct[name] = value
    return {"struct": struct, **{name: _frozen(value, tensors) for name, value in attributes.items()}}


def _address(part: Any) -> int | None:
    """Where the kernel finds a part of a packed weight; None if it has no such thing."""
    if isinstance(part, PackedWeight):
        return part.address
    return part.data_ptr() if isinstance(part, Tensor) else None


def _thawed(values: dict[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
    return {name: _thaw(value, tensors) for name, value in values.items()}


def _thaw(value: Any, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "dtype" in value:
        return getattr(torch, value["dtype"])
    parts = dict(value["packed"])
    struct = parts.pop("struct")
    weight = PackedWeight.__new__(PackedWeight)
    vars(weight).update(_thawed(parts, tensors))
    for name, *_ in LinearStruct._fields_:
        if isinstance(struct[name], str):
            struct[name] = _address(getattr(weight, struct[name]))
    weight.struct = LinearStruct(**struct)
    weight.address = ctypes.addressof(weight.struct)
    return weight
