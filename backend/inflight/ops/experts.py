"""The seam between a mixture's experts and the kernels that compute them: `ExpertOps`, and its definition in torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["MX_BLOCK", "ExpertOps", "ExpertProducts", "ExpertWeights", "SwiGlu", "reference_experts"]

MX_BLOCK = 32  # numbers that share a scale in MXFP4
# The numbers of E2M1 by code; of OCP Microscaling Formats (MX) v1.0, section 5.3.3.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One linear layer of each of E experts, from K inputs to N outputs.

    Attributes:
        values: [E, N, K] in the model's dtype, with any strides; or in MXFP4, uint8 [E, N, K / 2], contiguous: two
            codes of E2M1 a byte, the even input's in the low half.
        scales: of MXFP4, uint8 [E, N, K / MX_BLOCK], contiguous: code s of E8M0 is 2^(s - 127).  None: plain numbers.
        bias: [E, N], contiguous, in the model's dtype; or None.
    """

    values: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None

    @property
    def num_outputs(self) -> int:
        return self.values.shape[1]

    @property
    def num_inputs(self) -> int:
        return self.values.shape[2] * (1 if self.scales is None else 2)

    def of(self, expert: int, dtype: torch.dtype) -> Tensor:
        """The plain weight of an expert, [N, K] in `dtype`."""
        values = self.values[expert]
        if self.scales is None:
            return values.to(dtype)
        numbers = torch.tensor(_E2M1, device=values.device)[torch.stack([values & 15, values >> 4], -1).long()]
        blocks = numbers.view(len(values), -1, MX_BLOCK)
        return torch.ldexp(blocks, self.scales[expert, :, :, None].int() - 127).view(len(values), -1).to(dtype)


@dataclass(frozen=True, slots=True)
class SwiGlu:
    """The gate between an expert's two layers: silu(gate) * up, or gpt-oss's clamped form.

    Attributes:
        interleaved: outputs of the first layer are gate, up, gate, up, ...; otherwise all gates come first.
        limit: largest gate, and largest |up|; None: silu(gate) * up.
        alpha: with a limit, the result is gate * sigmoid(alpha * gate) * (up + 1).
    """

    interleaved: bool = False
    limit: float | None = None
    alpha: float = 1.0

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[R, 2 I] -> [R, I]"""
        gate, up = (gate_up[:, ::2], gate_up[:, 1::2]) if self.interleaved else gate_up.chunk(2, dim=-1)
        if self.limit is None:
            return F.silu(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """All experts of a layer: H inputs, 2 I outputs of `gate_up`, I inputs and H outputs of `down`."""

    gate_up: ExpertWeights
    down: ExpertWeights
    gate: SwiGlu

    @property
    def num_experts(self) -> int:
        return len(self.gate_up.values)


class ExpertOps(Protocol):
    """An implementation of experts.  Each of T tokens goes to K experts."""

    name: str

    def unsupported(self, experts: ExpertProducts, dtype: torch.dtype) -> str | None:
        """Why it cannot compute these experts for tokens in `dtype`; None if it can."""

    def prepare(self, experts: ExpertProducts, dtype: torch.dtype) -> None:
        """Compile every kernel that a step of any size launches, so that nothing is compiled while requests wait.

        Args:
            dtype: of tokens and routing weights.
        """

    def experts(self, x: Tensor, experts: ExpertProducts, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """sum over k of top_k_weights[t, k] * expert top_k_index[t, k] of x[t]

        Launches alone: reads nothing on the host, and what it launches depends on shapes alone.

        Args:
            x: [T, H]
            top_k_index: int64 [T, K]; an index outside of [0, E) adds nothing.
            top_k_weights: [T, K] in any floating dtype.

        Returns:
            [T, H] in the dtype of `x`.  Equal inputs give equal bits.
        """


def reference_experts(x: Tensor, experts: ExpertProducts, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The definition of `ExpertOps.experts` in torch, in the dtype of `x`; reads the routing on the host."""
    out = torch.zeros_like(x)
    for expert in range(experts.num_experts):
        tokens, choices = torch.where(top_k_index == expert)
        if len(tokens):
            inner = experts.gate(_linear(x[tokens], experts.gate_up, expert))
            result = _linear(inner, experts.down, expert) * top_k_weights[tokens, choices, None]
            out.index_add_(0, tokens, result.to(x.dtype))
    return out


def _linear(x: Tensor, weights: ExpertWeights, expert: int) -> Tensor:
    bias = None if weights.bias is None else weights.bias[expert].to(x.dtype)
    return F.linear(x, weights.of(expert, x.dtype), bias)
