"""Norms, rotary embedding and the MLP's gate: one Protocol (`base.py`), one implementation a device."""

from __future__ import annotations

import torch

from inflight.ops.base import FusedOps
from inflight.ops.reference import ReferenceOps
from inflight.triton_launch import can_launch

__all__ = ["FusedOps", "select_ops"]


def select_ops(device: torch.device) -> FusedOps:
    """The fastest implementation that runs on `device`: `ReferenceOps` where there is no other."""
    if can_launch(device):
        from inflight.ops.triton_ops import TritonOps

        return TritonOps()
    return ReferenceOps()
