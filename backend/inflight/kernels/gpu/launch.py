"""Whether kernels in the Triton language can be launched here."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil

import torch

__all__ = ["can_launch", "interpreted", "unavailable"]

_MIN_CAPABILITY = (8, 0)


def interpreted() -> bool:
    """Whether the Triton language's interpreter runs the kernels, on CPU tensors: for tests."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def unavailable() -> str | None:
    """Why the attention kernels cannot run here, and what to do about it; None if they can."""
    if not _has_package():
        return "the triton package is missing (pip install 'triton>=3.6')"
    if not torch.cuda.is_available():
        return None if interpreted() else "no CUDA device"
    if not _has_compiler():
        return "the launchers of the kernels need a C compiler (apt install gcc)"
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (capability, _MIN_CAPABILITY))
        return f"compute capability {have} (supported: {need} and later)"
    return None


@functools.cache
def can_launch(device: torch.device) -> bool:
    """Whether `device` is a GPU, with the triton package and the C compiler that it builds launchers with."""
    return device.type == "cuda" and _has_package() and _has_compiler()


def _has_package() -> bool:
    return importlib.util.find_spec("triton") is not None


def _has_compiler() -> bool:
    return bool(os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang"))))
