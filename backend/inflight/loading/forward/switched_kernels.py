"""Kernels that `kernel_config` switches on, attached to a model after its forward pass was chosen.

A kernel that takes over modules of the model is a function here: a new one is a file beside this one, and a line in
`_ATTACHMENTS`.  Each decides by itself which modules it can compute, and leaves the others alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import nn

from inflight.kernel_config import KernelConfig
from inflight.kernels.registry import select_experts
from inflight.loading.forward.fused_experts import fuse_experts
from inflight.loading.forward.split_k import split_linears

__all__ = ["Attach", "attach_kernels"]


class Attach(Protocol):
    def __call__(self, model: nn.Module, kernels: KernelConfig, passes: Callable[[], bool]) -> None:
        """Let a kernel compute modules of `model`, in place.

        Args:
            model: of transformers, on its device.
            kernels: all switches; that of this kernel is on.
            passes: whether the logits are right as the model is now.

        Raises:
            LoadError: the model cannot run without the kernel, which does not work here.
        """


def _split_k(model: nn.Module, kernels: KernelConfig, passes: Callable[[], bool]) -> None:
    split_linears(model, kernels.launch_pdl)


def _fused_experts(model: nn.Module, kernels: KernelConfig, passes: Callable[[], bool]) -> None:
    fuse_experts(model, select_experts(), passes)


# By the name of the switch, in the order in which they are attached.
_ATTACHMENTS: dict[str, Attach] = {"split_k": _split_k, "fused_experts": _fused_experts}


def attach_kernels(model: nn.Module, kernels: KernelConfig, passes: Callable[[], bool]) -> None:
    """Attach every kernel whose switch is on; see `Attach` for arguments and errors."""
    for switch, attach in _ATTACHMENTS.items():
        if switch in kernels.switches:
            attach(model, kernels, passes)
