"""Whether kernels in the Triton language can be launched here."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil

import torch

__all__ = ["can_launch"]


@functools.cache
def can_launch(device: torch.device) -> bool:
    """A GPU, the triton package, and a C compiler, with which the package builds what launches a kernel."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))
