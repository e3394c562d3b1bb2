"""A guard for CUDA devices in a torch without CUDA, for the functions of torch that set the current device.

`torch._C._ensureCUDADeviceGuardSet` provides one that does nothing, but only in a build with CUDA.  Here the meta
device's, which does nothing either, takes its place in c10's table of guards, one pointer for each type of device.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["device_guard"]

_TABLE = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA, _META = 1, 14  # c10::DeviceType


@contextlib.contextmanager
def device_guard() -> Iterator[None]:
    """Within the block there is one."""
    if torch.version.cuda is not None:
        torch._C._ensureCUDADeviceGuardSet()  # type: ignore[attr-defined]
        yield
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    table = (ctypes.c_void_p * (_META + 1)).in_dll(library, _TABLE)
    assert table[_CUDA] is None, "another emulated card is installed"
    table[_CUDA] = table[_META]
    try:
        yield
    finally:
        table[_CUDA] = None
