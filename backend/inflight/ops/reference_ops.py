"""The small operations in torch: the definition that kernels are checked against.

Inputs are converted to float32, and each result is rounded once, to its tensor's dtype.  transformers'
modules also round intermediate results: in bfloat16 they differ by a unit in the last place, in float32
they are bitwise equal.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from inflight.attention.base import LayerAttention
from inflight.ops.base import E4M3_MAX, MIN_SCALE, Angles, FusedOps, HeadNorms, QuantizedRows, Rows, projection_sizes

__all__ = ["ReferenceOps", "rotate_and_write_in_parts"]


class ReferenceOps:
    """`FusedOps` in plain torch, for any device and dtype."""

    name = "reference"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, quantized: bool = False) -> Rows:
        """See `FusedOps.rms_norm`; a new contiguous tensor in the dtype of `x`."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        out = (scaled * weight.float()).to(x.dtype).contiguous()
        return self.quantize_rows(out) if quantized else out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, factor: float = 1.0, quantized: bool = False
    ) -> Rows:
        """See `FusedOps.add_rms_norm`; the result has the dtype of `residual`."""
        residual.copy_(residual.float() + x.float() * factor)
        return self.rms_norm(residual, weight, eps, quantized)

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See `FusedOps.rotary`."""
        cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
        size = cos.shape[-1]
        for heads in (query, key):
            wide = heads[..., :size].float()
            first, second = wide.chunk(2, dim=-1)
            heads[..., :size] = wide * cos + torch.cat((-second, first), dim=-1) * sin

    def rotate_and_write(
        self, qkv: Tensor, layer: LayerAttention, batch: Any, norms: HeadNorms | None, angles: Angles | None
    ) -> Tensor:
        """See `FusedOps.rotate_and_write`; without norms the result is a view of `qkv`."""
        return rotate_and_write_in_parts(self, qkv, layer, batch, norms, angles)

    def silu_and_mul(self, gate_up: Tensor, quantized: bool = False) -> Rows:
        """See `FusedOps.silu_and_mul`; a new contiguous tensor in the dtype of `gate_up`."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        out = (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
        return self.quantize_rows(out) if quantized else out

    def quantize_rows(self, x: Tensor) -> QuantizedRows:
        """See `FusedOps.quantize_rows`."""
        wide = x.float()
        scales = (wide.abs().amax(-1) / E4M3_MAX).clamp_min(MIN_SCALE)
        return QuantizedRows((wide / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales)


def rotate_and_write_in_parts(
    ops: FusedOps, qkv: Tensor, layer: LayerAttention, batch: Any, norms: HeadNorms | None, angles: Angles | None
) -> Tensor:
    """The definition of `FusedOps.rotate_and_write`: its steps one by one, for any backend and cache."""
    spec = layer.spec
    heads = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
    parts = qkv.split(projection_sizes(spec), dim=-1)
    query, key, value = (part.unflatten(-1, (count, -1)) for part, count in zip(parts, heads))
    if norms is not None:
        query = cast(Tensor, ops.rms_norm(query, norms.query_weight, norms.eps))
        key = cast(Tensor, ops.rms_norm(key, norms.key_weight, norms.eps))
    if angles is not None:
        ops.rotary(query, key, *angles.of_tokens())
    layer.backend.write(key, value, layer.cache, batch)
    return query
