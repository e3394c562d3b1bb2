"""`torch._scaled_mm` as cuBLAS has it on compute capability 9.0: scales of a tensor, or of rows and columns."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["scaled_mm"]

_MULTIPLE = 16
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def scaled_mm(
    self: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """[M, K] x [K, N], with products and sums in float32.

    Raises:
        RuntimeError, ValueError: operands that a GPU refuses.
    """
    (rows, inner), columns = self.shape, mat2.shape[1]
    if self.dtype not in _FP8 or mat2.dtype not in _FP8 or mat2.shape[0] != inner:
        raise RuntimeError(f"Invalid operands of _scaled_mm: {self.dtype} {list(self.shape)}, {mat2.dtype}")
    if inner % _MULTIPLE or columns % _MULTIPLE:
        raise RuntimeError(
            f"Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: ({rows}x{inner}), and mat2 "
            f"shape ({inner}x{columns})."
        )
    if self.stride(1) != 1 or mat2.stride(0) != 1:
        raise RuntimeError("Invalid strides for scaled_mm: mat1 must be row major and mat2 column major")
    if scale_a.dtype != torch.float32 or scale_b.dtype != torch.float32:
        raise RuntimeError("For scaled_mm, both scales must be float32")
    of_tensors = scale_a.numel() == scale_b.numel() == 1
    of_rows = scale_a.shape == (rows, 1) and scale_b.shape == (1, columns)
    if not (of_tensors or of_rows):
        raise RuntimeError(
            f"Invalid scaling configuration: scales of {list(scale_a.shape)} and {list(scale_b.shape)} for "
            f"({rows}x{inner}) and ({inner}x{columns})"
        )
    if of_rows and not of_tensors and not (scale_a.is_contiguous() and scale_b.is_contiguous()):
        raise RuntimeError("Both scale_a and scale_b must be contiguous for rowwise scaling.")
    result_dtype = out_dtype or self.dtype
    if of_rows and not of_tensors and result_dtype not in (torch.bfloat16, torch.float16):
        raise ValueError("Only bf16 and fp16 high precision output types are supported for row-wise scaling.")
    if self.device.type == "meta":
        return torch.empty(rows, columns, dtype=result_dtype, device="meta")
    product = (self.float() @ mat2.float()) * scale_a * scale_b
    if bias is not None:
        product = product + bias.float()
    return product.to(result_dtype)
