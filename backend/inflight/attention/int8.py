"""Rows of keys or values in eight bits: what the pool holds with `kv_cache_dtype: "int8"`.

Symmetric, one scale per token and head (as in vLLM's and OpenVINO's per-token quantisation): an
element is `byte * scale`, `byte` in -127 .. 127.  The scale is the row's peak / 127 as bfloat16,
rounded up, so that it costs two bytes and nothing is clipped.  `cpu_int8.h` computes the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SCALE_BYTES", "dequantize", "pack", "quantize", "unpack"]

SCALE_BYTES = 2
_LEVELS = 127.0
_SMALLEST = 2.0**-100  # a scale below it counts as zero: its inverse would overflow


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows [..., D] of any float dtype -> int8 [..., D] and their bfloat16 scales [...].

    A row with an element that is not finite gets the scale NaN.
    """
    rows = rows.float()
    peak = rows.abs().amax(-1)
    scale = peak / _LEVELS
    scale = torch.where(scale < _SMALLEST, 0.0, _round_up(scale))
    scale = torch.where(peak.isfinite(), scale, torch.nan)
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)  # NaN > 0 is false
    words = (rows * inverse[..., None]).round()
    return words.nan_to_num(0.0).to(torch.int8), scale.to(torch.bfloat16)


def dequantize(words: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What `quantize` made of rows, as `dtype`: [..., D]."""
    return (words.float() * scale.float()[..., None]).to(dtype)


def pack(rows: Tensor) -> Tensor:
    """rows [..., D] -> int8 [..., D + 2]: the elements, then the scale's two bytes."""
    words, scale = quantize(rows)
    return torch.cat([words, scale[..., None].view(torch.int8)], dim=-1)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """What `pack` made of rows, as `dtype`: [..., D]."""
    words, scale = packed[..., :-SCALE_BYTES], packed[..., -SCALE_BYTES:].contiguous()
    return dequantize(words, scale.view(torch.bfloat16)[..., 0], dtype)


def _round_up(scale: Tensor) -> Tensor:
    """The next bfloat16 at or above, as float32; scale >= 0."""
    bits = scale.contiguous().view(torch.int32)
    return (((bits + 0xFFFF) >> 16) << 16).view(torch.float32)
