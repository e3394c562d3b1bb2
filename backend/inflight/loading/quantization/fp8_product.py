"""Products of numbers in e4m3, and what takes the place of row-wise scales where this card or torch has none.

Row-wise scales are the youngest feature of `torch._scaled_mm`: which sizes it supports depends on the card, on cuBLAS
and on torch, and it raises where it does not.  So each layer tries its product when it is made, with few rows and with
more, and takes the first one below that runs.  A step never finds out.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.loading.load_errors import LoadError, in_one_line
from inflight.ops.base import QuantizedRows

__all__ = ["Product", "product", "that_runs"]

_log = logging.getLogger(__name__)

# (x [M, K], weight e4m3 [N, K], its scales float32 [N], bias [N] or None, dtype) -> dtype [M, N]
Product = Callable[[QuantizedRows, Tensor, Tensor, "Tensor | None", torch.dtype], Tensor]

_MIN_ROWS = 16  # of a product with padding
_TRIED_ROWS = (1, 2, _MIN_ROWS + 1)


def product(x: QuantizedRows, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [M, K] times the transpose of weight [N, K], both times their scales, plus bias [N]: `dtype` [M, N].

    Sums are in float32, on Hopper with the fewer bits of its fast accumulation (as vLLM's and torchao's products); the
    result is rounded once.  `_scaled_mm` wants the second matrix column-major, scales [M, 1] and [1, N] in float32,
    and the bias in `dtype`.
    """
    if weight.device.type == "cpu":
        sums = x.values.float() @ weight.float().t() * x.scales[:, None] * weight_scale
        return (sums if bias is None else sums + bias.float()).to(dtype)
    return torch._scaled_mm(
        x.values,
        weight.t(),
        scale_a=x.scales[:, None],
        scale_b=weight_scale[None, :],
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def that_runs(first: Product, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Product:
    """`first` if it runs for this layer, with any number of rows; else the first of its substitutes that does.

    A substitute is named in the log, once for all layers of a size.

    Raises:
        LoadError: none does.
    """
    if weight.device.type == "meta":
        return first
    why = None
    for name, tried in _candidates(first):
        error = _error_of(tried, weight, weight_scale, bias, dtype)
        if error is None:
            if why is not None:
                _warn_once(tuple(weight.shape), name, why)
            return tried
        why = why or error
    raise LoadError(f"no product with fp8 weights of size {list(weight.shape)} runs on this device: {why}")


def _candidates(first: Product) -> Iterator[tuple[str, Product]]:
    yield "row-wise products", first
    yield f"row-wise products of at least {_MIN_ROWS} rows, most of them padding", functools.partial(_padded, first)
    yield "products without scales, which are applied afterwards", _scaled_afterwards
    yield "products of dequantised weights, which read and write them in 16 bits", _dequantised


def _padded(
    inner: Product, x: QuantizedRows, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    missing = _MIN_ROWS - len(x.values)
    if missing > 0:
        # Not every device pads fp8, but every one pads bytes; the byte 0 is zero.
        values = F.pad(x.values.view(torch.uint8), (0, 0, 0, missing)).view(x.values.dtype)
        padded = QuantizedRows(values, F.pad(x.scales, (0, missing), value=1.0))
        return inner(padded, weight, weight_scale, bias, dtype)[: len(x.values)]
    return inner(x, weight, weight_scale, bias, dtype)


def _scaled_afterwards(
    x: QuantizedRows, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    one = x.scales.new_ones(())
    sums = torch._scaled_mm(
        x.values, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=True
    )
    sums = sums.mul_(x.scales[:, None]).mul_(weight_scale)
    return (sums if bias is None else sums.add_(bias)).to(dtype)


def _dequantised(
    x: QuantizedRows, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Numbers in e4m3 are exact in 16 bits; their scales are rounded."""
    rows = x.values.to(dtype) * x.scales[:, None].to(dtype)
    return F.linear(rows, weight.to(dtype) * weight_scale[:, None].to(dtype), bias)


def _error_of(
    tried: Product, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> str | None:
    """The error of a product with one of the numbers of rows; None if all run."""
    for rows in _TRIED_ROWS:
        values = torch.zeros(rows, weight.shape[1], dtype=torch.uint8, device=weight.device).view(weight.dtype)
        x = QuantizedRows(values, torch.ones(rows, dtype=torch.float32, device=weight.device))
        try:
            tried(x, weight, weight_scale, bias, dtype)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return f"at {rows} row{'s' * (rows > 1)}: {in_one_line(error)}"
    return None


@functools.cache
def _warn_once(size: tuple[int, ...], name: str, why: str) -> None:
    _log.warning("fp8 layers of size %s use %s: row-wise scales fail here %s", list(size), name, why)
