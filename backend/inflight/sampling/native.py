"""The compiled kernel that chooses the tokens of a whole batch in one call."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from inflight.kernels.gpu.launch import can_launch

__all__ = ["Choose", "native_choose"]

# `choose(logits, columns, marks)` of `kernels/cpu/sampler.py` and `kernels/gpu/gpu_sampler.py`.
Choose = Callable[[Tensor, Tensor, bool], Tensor]


def native_choose(device: torch.device) -> Choose | None:
    """The kernel for logits on `device`; None where there is none, and `choose.py` draws with torch's operations."""
    if can_launch(device):
        from inflight.kernels.gpu import gpu_sampler

        return lambda logits, columns, marks: gpu_sampler.choose(logits, columns, marks=marks)
    return _choose_on_cpu() if device.type == "cpu" else None


@functools.cache
def _choose_on_cpu() -> Choose | None:
    from inflight.kernels.cpu import sampler
    from inflight.kernels.cpu.library import unavailable

    return sampler.choose if unavailable() is None else None
