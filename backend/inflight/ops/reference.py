"""The small operations in torch: the definition that kernels are checked against.

Inputs are converted to float32, and each result is rounded once, to its tensor's dtype.  transformers'
modules also round intermediate results: in bfloat16 they differ by a unit in the last place, in float32
they are bitwise equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.ops.base import E4M3_MAX, MIN_SCALE, QuantizedRows

__all__ = ["ReferenceOps"]


class ReferenceOps:
    """`FusedOps` in plain torch, for any device and dtype."""

    name = "reference"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `FusedOps.rms_norm`; a new contiguous tensor in the dtype of `x`."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (scaled * weight.float()).to(x.dtype).contiguous()

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `FusedOps.add_rms_norm`; the result has the dtype of `residual`."""
        residual.copy_(residual.float() + x.float())
        return self.rms_norm(residual, weight, eps)

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See `FusedOps.rotary`."""
        cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
        size = cos.shape[-1]
        for heads in (query, key):
            wide = heads[..., :size].float()
            first, second = wide.chunk(2, dim=-1)
            heads[..., :size] = wide * cos + torch.cat((-second, first), dim=-1) * sin

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `FusedOps.silu_and_mul`; a new contiguous tensor in the dtype of `gate_up`."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)

    def quantize_rows(self, x: Tensor) -> QuantizedRows:
        """See `FusedOps.quantize_rows`."""
        wide = x.float()
        scales = (wide.abs().amax(-1) / E4M3_MAX).clamp_min(MIN_SCALE)
        return QuantizedRows((wide / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales)
