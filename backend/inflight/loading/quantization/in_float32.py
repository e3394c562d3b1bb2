"""A model with half-precision weights in float32, operation by operation, without a second copy of its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from inflight.loading.quantization.block_fp8_linear import BlockFp8Linear
from inflight.loading.quantization.coded_linear import CodedLinear
from inflight.loading.quantization.fp8_linear import Fp8Linear
from inflight.loading.quantization.int4_linear import Int4Linear

__all__ = ["InFloat32", "can_run_in_float32"]

_HALF = (torch.bfloat16, torch.float16)
_LOOKUPS = ("embedding", "__getitem__")  # read a part of a tensor


class InFloat32(TorchFunctionMode):
    """Context: every function of torch gets its half-precision tensors, and dtypes among its arguments, as float32.

    A weight is widened for the one operation that reads it; of a table, only the rows that are looked up.  Nothing
    half-precise is written to: results, and what the model makes of them, are float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):  # attributes, such as a weight's shape
            return func(*args, **(kwargs or {}))
        if name in _LOOKUPS:
            return _widened(func(*args, **(kwargs or {})))
        return func(*tree_map(_widened, args), **tree_map(_widened, kwargs or {}))


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALF else value
    return torch.float32 if isinstance(value, torch.dtype) and value in _HALF else value


def can_run_in_float32(model: nn.Module) -> bool:
    """Whether all weights are plain numbers, in fp8 or in codes; others are read by kernels with own dtypes."""
    in_codes = Fp8Linear | BlockFp8Linear | Int4Linear | CodedLinear
    parts = [module for module in model.modules() if not isinstance(module, in_codes)]
    tensors = (x for part in parts for x in (*part.parameters(recurse=False), *part.buffers(recurse=False)))
    floats = [x for x in tensors if x.is_floating_point()]
    return all(p.dtype in (torch.float32, *_HALF) for p in floats) and any(p.dtype in _HALF for p in floats)
