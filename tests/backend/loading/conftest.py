"""Tests here run the compiled kernels."""

from __future__ import annotations

from kernel_build import current_kernel

__all__ = ["current_kernel"]
