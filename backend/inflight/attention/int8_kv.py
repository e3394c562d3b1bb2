"""Rows of keys or values in int8: the pool's format with `kv_cache_dtype: "int8"`.

Symmetric, with one scale per token and head (as in vLLM's and OpenVINO's per-token quantization): an
element is `byte * scale` with `byte` in -127 .. 127.  The scale is the row's largest magnitude / 127, rounded up to
bfloat16: it takes two bytes, and nothing is clipped.  `cpu_int8.h` computes bitwise the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SCALE_BYTES", "dequantize", "pack", "quantize", "unpack"]

SCALE_BYTES = 2
_LEVELS = 127.0
_SMALLEST = 2.0**-100  # smaller scales are treated as zero: the inverse would overflow


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows [..., D] of any float dtype -> int8 [..., D] and their bfloat16 scales [...].

    The scale of a row with an element that is not finite is NaN.
    """
    rows = rows.float()
    peak = rows.abs().amax(-1)
    scale = peak / _LEVELS
    scale = torch.where(scale < _SMALLEST, 0.0, _round_up(scale))
    scale = torch.where(peak.isfinite(), scale, torch.nan)
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)  # NaN > 0 is false
    elements = (rows * inverse[..., None]).round()
    return elements.nan_to_num(0.0).to(torch.int8), scale.to(torch.bfloat16)


def dequantize(elements: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantize`, up to rounding: [..., D] of `dtype`."""
    return (elements.float() * scale.float()[..., None]).to(dtype)


def pack(rows: Tensor) -> Tensor:
    """rows [..., D] -> int8 [..., D + 2]: the elements, then the two bytes of the scale."""
    elements, scale = quantize(rows)
    return torch.cat([elements, scale[..., None].view(torch.int8)], dim=-1)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `pack`, up to rounding: [..., D] of `dtype`."""
    elements, scale = packed[..., :-SCALE_BYTES], packed[..., -SCALE_BYTES:].contiguous()
    return dequantize(elements, scale.view(torch.bfloat16)[..., 0], dtype)


def _round_up(scale: Tensor) -> Tensor:
    """scale >= 0, rounded up to bfloat16, as float32."""
    bits = scale.contiguous().view(torch.int32)
    return (((bits + 0xFFFF) >> 16) << 16).view(torch.float32)
