"""GPTQ: weights in few bits, column by column; the following columns make up for each one's error.

Frantar, Ashkboos, Hoefler, Alistarh: "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2022.  With H = X^T X of a layer's inputs and H^-1 = U^T U, U upper triangular, the change of the output
that rounding column k by e causes is least if the columns j > k lose e * U[k, j] / U[k, k] (their algorithm 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Codes", "Hessian", "Undefined", "gptq", "grid_of"]

_DAMPING = 0.01  # of the mean of H's diagonal, added to it
_COLUMNS = 128  # whose errors reach the columns after them in one product; groups of inputs divide it
# Ranges that are tried for a group, as shares of the widest: a narrower one cuts the largest weights and rounds the
# others less.
_RANGES = tuple(1 - step / 20 for step in range(9))


class Undefined(ValueError):
    """Weights or inputs are infinite or not numbers."""


@dataclass(frozen=True)
class Codes:
    """weight[n, k] = (values[n, k] - zeros[n, g]) * scales[n, g], g = k // group.

    Attributes:
        values: uint8 [N, K], from 0 to 2**bits - 1.
        scales: [N, K / group], in the dtype in which they are stored.
        zeros: uint8 [N, K / group].
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int

    @property
    def group(self) -> int:
        return self.values.shape[1] // self.scales.shape[1]

    def dequantize(self) -> Tensor:
        """float32 [N, K]."""
        wide = self.values.view(*self.scales.shape, self.group).to(torch.float32)
        return wide.sub_(self.zeros[..., None]).mul_(self.scales[..., None].float()).flatten(1)

    def split(self, sizes: Sequence[int]) -> list[Codes]:
        """Those of layers with a common input, `sizes` outputs each."""
        values, scales, zeros = (each.split(list(sizes)) for each in (self.values, self.scales, self.zeros))
        return [Codes(*part, bits=self.bits) for part in zip(values, scales, zeros)]


class Hessian:
    """X^T X of the inputs of a layer.

    Attributes:
        matrix: float32 [K, K]
    """

    def __init__(self, num_inputs: int) -> None:
        self.matrix = torch.zeros(num_inputs, num_inputs)

    def add(self, x: Tensor) -> None:
        """x float32 [T, K]."""
        self.matrix.addmm_(x.t(), x)

    def factor(self) -> Tensor:
        """U, float32 [K, K], upper triangular, with H^-1 = U^T U.

        With H = R R^T, R upper triangular, U is the inverse of R, which needs no inverse of H.  An input that is
        always zero has no part in it.

        Raises:
            Undefined: inputs were infinite or not numbers.
        """
        matrix = self.matrix.double()
        diagonal = matrix.diagonal()
        diagonal[diagonal == 0] = diagonal.mean().clamp_min(1.0)
        diagonal += _DAMPING * diagonal.mean()
        if not bool(diagonal.isfinite().all()):
            raise Undefined("its inputs are infinite or not numbers")
        lower = torch.linalg.cholesky(matrix.flip(0, 1))
        identity = torch.eye(len(matrix), dtype=matrix.dtype)
        return torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True).float()


def gptq(weight: Tensor, hessian: Hessian, bits: int, group: int, dtype: torch.dtype) -> Codes:
    """The codes of a weight, float32 [N, K].

    Args:
        group: inputs with a common scale; divides K and 128.
        dtype: of the scales.

    Raises:
        Undefined: weights or inputs are infinite or not numbers.
    """
    if not bool(weight.isfinite().all()):
        raise Undefined("its weights are infinite or not numbers")
    num_outputs, num_inputs = weight.shape
    factor, importance = hessian.factor(), hessian.matrix.diagonal()
    left = weight.t().contiguous()  # [K, N]: what is left to be quantized, with the errors of the columns before
    values = torch.empty(num_inputs, num_outputs, dtype=torch.uint8)
    scales = torch.empty(num_inputs // group, num_outputs, dtype=dtype)
    zeros = torch.empty(num_inputs // group, num_outputs, dtype=torch.uint8)
    for start in range(0, num_inputs, _COLUMNS):
        columns = slice(start, min(start + _COLUMNS, num_inputs))
        block, shares = left[columns], factor[columns, columns]
        errors = torch.empty_like(block)
        for k in range(len(block)):
            place = (start + k) // group
            if k % group == 0:
                scales[place], zeros[place] = grid_of(
                    block[k : k + group], importance[start + k :][:group], bits, dtype
                )
                scale, zero = scales[place].float(), zeros[place].float()
            code = (block[k] / scale).round_().add_(zero).clamp_(0, 2**bits - 1)
            values[start + k] = code
            errors[k] = (block[k] - (code - zero) * scale) / shares[k, k]
            block[k + 1 :].addr_(shares[k, k + 1 :], errors[k], alpha=-1)
        left[columns.stop :].addmm_(factor[columns, columns.stop :].t(), errors, alpha=-1)
    return Codes(values.t().contiguous(), scales.t().contiguous(), zeros.t().contiguous(), bits)


def grid_of(weights: Tensor, importance: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales in `dtype` and zero points in uint8, [N] each, of a group of inputs: weights float32 [group, N].

    Zero is one of the numbers.  Of some ranges the one is taken whose rounding changes outputs least, as far as the
    inputs' own squares, `importance` [group], say.
    """
    top = 2**bits - 1
    low, high = weights.amin(0).clamp_max(0), weights.amax(0).clamp_min(0)
    best = torch.full_like(low, torch.inf)
    best_scale, best_zero = torch.ones_like(low, dtype=dtype), torch.zeros_like(low)
    for share in _RANGES:
        scale = ((high - low) * (share / top)).clamp_min(torch.finfo(dtype).tiny).to(dtype)
        wide = scale.float()
        zero = (-low * share / wide).round_().clamp_(0, top)
        rounded = (weights / wide).round_().add_(zero).clamp_(0, top).sub_(zero).mul_(wide)
        error = importance @ (rounded - weights).square_()
        better = error < best
        best = torch.where(better, error, best)
        best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)
    return best_scale, best_zero.to(torch.uint8)
