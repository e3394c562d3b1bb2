"""Makes the Triton language's interpreter round to bfloat16 and e4m3 as a GPU does (to nearest, ties to even), and
multiply and subtract numbers in bfloat16.

As shipped (3.6 to 3.9) it truncates to bfloat16, computes with the bits of bfloat16 as integers, and in e4m3 loses the
carry when a value rounds up to a power of two and reads NaN as 480.  Its conversions to wider types take long, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

__all__ = ["gpu_rounding", "rounded_as_on_a_gpu"]


@contextlib.contextmanager
def rounded_as_on_a_gpu() -> Iterator[None]:
    """Within the block."""
    from triton.runtime import interpreter

    convert, multiply, subtract = _replacements()
    builder = interpreter.InterpreterBuilder
    operations = patch.multiple(builder, create_fmul=multiply, create_fsub=subtract)
    with patch.object(interpreter, "_convert_float", convert), operations:
        yield


@functools.cache
def _replacements() -> tuple[Any, Any, Any]:
    """Of `interpreter._convert_float`, and of create_fmul and create_fsub of the builder; the same ones each time."""
    import triton.language as tl
    from triton.runtime import interpreter

    shipped = interpreter._convert_float

    def convert(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        """The bits of the result as unsigned integers."""
        if source == tl.float32 and target == tl.bfloat16:
            return torch.from_numpy(np.array(data)).bfloat16().view(torch.uint16).numpy()
        if source == tl.float32 and target == tl.float8e4nv:  # cvt.rn.satfinite.e4m3x2.f32
            finite = torch.from_numpy(np.array(data)).clamp(-448, 448)
            return finite.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if source == tl.bfloat16 and target == tl.float32:
            return np.left_shift(data.astype(np.uint32), 16)
        if source == tl.float8e4nv and target in (tl.float16, tl.float32):
            numbers = torch.from_numpy(np.array(data)).view(torch.float8_e4m3fn)
            if target == tl.float16:
                return numbers.half().view(torch.uint16).numpy()
            return numbers.float().view(torch.uint32).numpy()
        return shipped(data, source, target, mode)

    def computed(builder: Any, lhs: Any, rhs: Any, by_numpy: Any, by_torch: Any) -> Any:
        if lhs.dtype.scalar != tl.bfloat16:
            return builder.binary_op(lhs, rhs, by_numpy)
        numbers = [torch.from_numpy(np.array(operand.data)).view(torch.bfloat16) for operand in (lhs, rhs)]
        return interpreter.TensorHandle(by_torch(*numbers).view(torch.uint16).numpy(), lhs.dtype.scalar)

    def multiply(builder: Any, lhs: Any, rhs: Any) -> Any:
        return computed(builder, lhs, rhs, np.multiply, torch.mul)

    def subtract(builder: Any, lhs: Any, rhs: Any) -> Any:
        return computed(builder, lhs, rhs, np.subtract, torch.sub)

    return convert, multiply, subtract


@pytest.fixture
def gpu_rounding() -> Iterator[None]:
    with rounded_as_on_a_gpu():
        yield
