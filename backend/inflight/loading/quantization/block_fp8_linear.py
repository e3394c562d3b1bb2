"""Linear layers with weights in e4m3 and a scale per block, as DeepSeek's and Qwen's checkpoints store them.

The inputs stay in 16 bits, so that a product is that of the dequantised weight, up to the order of additions.  Steps of
at most MAX_ROWS tokens read the weight in eight bits (`kernels/gpu/gpu_block_fp8.py`).  Larger ones compute more than
they read: they dequantise the weight, one layer at a time, for a product of cuBLAS.

DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inflight.config import EngineConfig
from inflight.loading.load_errors import LoadError, in_one_line
from inflight.loading.quantization.fp8_linear import concatenated
from inflight.ops.block_fp8 import BLOCK_INPUTS, BlockFp8Ops

__all__ = ["BlockFp8Linear", "stays_in_blocks", "verify"]

MAX_ROWS = 256
_MULTIPLE = 16  # divides the inputs of a layer, so that rows are read 16 bytes at a time
_DTYPES = (torch.bfloat16, torch.float16)
_TOLERANCE = 8  # of a product's relative error, in units of the dtype's rounding


def stays_in_blocks(config: EngineConfig, block: Sequence[int] | None, dtype: torch.dtype) -> bool:
    """Whether weights in e4m3 with a scale per `block` (rows, columns) keep them, in a model of `dtype`."""
    return config.kernel_config.block_fp8 and block is not None and block[1] % BLOCK_INPUTS == 0 and dtype in _DTYPES


class BlockFp8Linear(nn.Module):
    """`nn.Linear` with a weight in e4m3 that has a scale per block.

    Attributes:
        weight: e4m3 [N, K], contiguous.
        weight_scale: float32 [cdiv(N, block[0]), cdiv(K, block[1])]; actual weight = weight * scale of its block.
        bias: [N], or None.
        block: outputs and inputs that share a scale.
        dtype: of inputs and results.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        block: tuple[int, int],
        bias: Tensor | None,
        dtype: torch.dtype,
        ops: BlockFp8Ops,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.block = block
        self.dtype = dtype
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("bias", bias)
        self._ops = ops

    @staticmethod
    def fits(linear: nn.Linear) -> bool:
        """Whether the kernel supports the layer's sizes."""
        return linear.in_features % _MULTIPLE == 0

    @classmethod
    def merged(cls, parts: Sequence[BlockFp8Linear]) -> BlockFp8Linear:
        """All layers in one product, results side by side; tensors of `parts` become views of the merged ones.

        Raises:
            ValueError: a block of all but the last would span two layers, only some have a bias, or they differ.
        """
        first = parts[0]
        if len({(part.dtype, part.in_features, part.block, part.bias is None) for part in parts}) > 1:
            raise ValueError("the layers differ in dtype, blocks, size of their input, or in whether they have a bias")
        if any(part.out_features % part.block[0] for part in parts[:-1]):
            raise ValueError(f"their outputs are not multiples of {first.block[0]}, the rows of a block")
        bias = None if first.bias is None else concatenated(parts, "bias")
        weight, scale = concatenated(parts, "weight"), concatenated(parts, "weight_scale")
        return cls(weight, scale, first.block, bias, first.dtype, first._ops)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N].  An x of another dtype than the layer's is multiplied in that dtype."""
        if x.dtype != self.dtype or x.numel() > MAX_ROWS * self.in_features:
            return F.linear(x, self.dequantised(x.dtype), self.bias)
        rows = x.reshape(-1, self.in_features)
        out = self._ops.linear(rows, self.weight, self.weight_scale, self.block, self.bias)
        return out.view(*x.shape[:-1], self.out_features)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] in `dtype`, each number rounded once."""
        (rows, columns), (num_outputs, num_inputs) = self.block, self.weight.shape
        out = self.weight.to(dtype)
        if num_outputs % rows or num_inputs % columns:
            wide = self.weight_scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            return out.mul_(wide[:num_outputs, :num_inputs])
        out.view(-1, rows, num_inputs // columns, columns).mul_(self.weight_scale[:, None, :, None])
        return out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self.dtype}"


@torch.inference_mode()
def verify(made: BlockFp8Linear, name: str) -> None:
    """Compile the kernels of a layer, and compare products of a few rows with those of its dequantised weight.

    Raises:
        LoadError: they fail, or differ.
    """
    off, why = 0.0, ""
    plain = made.dequantised(torch.float32)
    for rows in (1, 17):
        x = torch.randn(rows, made.in_features, generator=torch.Generator().manual_seed(0))
        x = x.to(device=made.weight.device, dtype=made.dtype)
        expected = F.linear(x.float(), plain, None if made.bias is None else made.bias.float())
        try:
            off = ((made(x).float() - expected).norm() / expected.norm().clamp_min(1e-9)).item()
            why = f"differs by {off:.1%} from that of the dequantised weight"
        except Exception as error:  # of the compiler, or of a launch
            off, why = float("inf"), f"fails: {in_one_line(error)}"
        if not off <= _TOLERANCE * torch.finfo(made.dtype).eps:
            size = f"[{made.out_features}, {made.in_features}]"
            raise LoadError(
                f"kernel_config: block_fp8 does not work here: the product of {name} {size} {why}; remove it"
            )
