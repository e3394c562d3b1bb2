"""Tests here run the compiled kernels."""

from __future__ import annotations

from gpu_rounding import gpu_rounding
from kernel_build import current_kernel

__all__ = ["current_kernel", "gpu_rounding"]
