"""gpt-oss's experts in four bits, as its checkpoints store them (`quant_method: "mxfp4"`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from inflight.config import EngineConfig
from inflight.ops.experts import MX_BLOCK, ExpertProducts, ExpertWeights, SwiGlu, reference_experts

__all__ = ["Mxfp4Experts", "stays_packed"]

_DTYPES = (torch.bfloat16, torch.float16)


def stays_packed(config: EngineConfig, dtype: torch.dtype) -> bool:
    """Whether a checkpoint's experts in MXFP4 are kept in four bits, in a model of `dtype`."""
    return config.kernel_config.fused_experts and dtype in _DTYPES


class Mxfp4Experts(nn.Module):
    """Takes the place of transformers' `GptOssExperts`; names and shapes of its parameters are the checkpoint's.

    By itself it unpacks each expert for each call, which is slow: it says what the weights mean.  A kernel takes the
    place of `forward` (`loading/forward/fused_experts.py`).

    Attributes:
        gate_up_proj_blocks, down_proj_blocks: uint8 [E, outputs, inputs / 32, 16], two codes of E2M1 a byte.
        gate_up_proj_scales, down_proj_scales: uint8 [E, outputs, inputs / 32], codes of E8M0.
        gate_up_proj_bias, down_proj_bias: [E, outputs] in the model's dtype.
    """

    gate_up_proj_blocks: Tensor
    gate_up_proj_scales: Tensor
    gate_up_proj_bias: Tensor
    down_proj_blocks: Tensor
    down_proj_scales: Tensor
    down_proj_bias: Tensor

    def __init__(self, num_experts: int, hidden_size: int, inner_size: int, gate: SwiGlu, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = gate
        for name, outputs, inputs in (("gate_up", 2 * inner_size, hidden_size), ("down", hidden_size, inner_size)):
            blocks = num_experts, outputs, inputs // MX_BLOCK
            self._add(f"{name}_proj_blocks", torch.empty(*blocks, MX_BLOCK // 2, dtype=torch.uint8))
            self._add(f"{name}_proj_scales", torch.empty(blocks, dtype=torch.uint8))
            self._add(f"{name}_proj_bias", torch.empty(num_experts, outputs, dtype=dtype))

    @classmethod
    def in_place_of(cls, module: Any) -> Mxfp4Experts:
        """Experts without contents, of the sizes, gate and dtype of a `GptOssExperts`, on the current device."""
        gate = SwiGlu(interleaved=True, limit=module.limit, alpha=module.alpha)
        dtype = module.gate_up_proj_bias.dtype
        return cls(module.num_experts, module.hidden_size, module.intermediate_size, gate, dtype)

    @property
    def products(self) -> ExpertProducts:
        """The weights, as views of the parameters."""
        gate_up = self.gate_up_proj_blocks.flatten(2), self.gate_up_proj_scales, self.gate_up_proj_bias
        down = self.down_proj_blocks.flatten(2), self.down_proj_scales, self.down_proj_bias
        return ExpertProducts(ExpertWeights(*gate_up), ExpertWeights(*down), self.gate)

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        """hidden_states [T, H], router_indices and routing_weights [T, K] -> [T, H]"""
        return reference_experts(hidden_states, self.products, router_indices, routing_weights)

    def _add(self, name: str, tensor: Tensor) -> None:
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
