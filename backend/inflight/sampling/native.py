"""The compiled kernel that chooses the tokens of a whole batch in one call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from inflight.kernels.gpu.launch import can_launch

__all__ = ["Choose", "cpu_sampler", "native_choose"]

# `choose(logits, columns, marks)` of `kernels/cpu/cpu_sampler.py` and `kernels/gpu/gpu_sampler.py`.
Choose = Callable[[Tensor, Tensor, bool], Tensor]


def native_choose(device: torch.device) -> Choose | None:
    """The kernel for logits on `device`; None where there is none, and `choose.py` draws with torch's operations."""
    if can_launch(device):
        from inflight.kernels.gpu import gpu_sampler

        return lambda logits, columns, marks: gpu_sampler.choose(logits, columns, marks=marks)
    module = cpu_sampler() if device.type == "cpu" else None
    return None if module is None else module.choose


@functools.cache
def cpu_sampler() -> ModuleType | None:
    """`kernels/cpu/cpu_sampler.py`, which applies masks, too; None where its library cannot be had."""
    from inflight.kernels.cpu import cpu_sampler as kernel
    from inflight.kernels.cpu.library import unavailable

    return kernel if unavailable() is None else None
