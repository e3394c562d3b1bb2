"""The choice of an implementation of the small operations."""

from __future__ import annotations

import torch

from inflight.kernels.gpu.launch import can_launch
from inflight.ops.base import FusedOps
from inflight.ops.reference import ReferenceOps

__all__ = ["select_ops"]


def select_ops(device: torch.device) -> FusedOps:
    """The fastest implementation for `device`; `ReferenceOps` if there is no other."""
    if can_launch(device):
        from inflight.kernels.gpu.gpu_ops import GpuOps

        return GpuOps()
    return ReferenceOps()
