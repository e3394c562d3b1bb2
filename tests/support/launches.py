"""The launches of a forward pass: operations of torch and kernels of the Triton language, on the meta device.

Tensors of the meta device have no data: reading one, or copying it to the host, is an error.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from inflight.kernels import gpu

__all__ = ["Launches", "to_meta"]

# Allocate, or change only shape and strides.
_NO_LAUNCH = {"aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten._unsafe_view"}


class Launches(TorchDispatchMode):
    """Records launches within the block, in order; kernels do not run.

    Attributes:
        names: `aten.mm` for an operation, the function's name for a kernel.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        for found in pkgutil.iter_modules(gpu.__path__):
            module = importlib.import_module(f"{gpu.__name__}.{found.name}")
            for key, value in list(vars(module).items()):
                if _is_kernel(value):
                    monkeypatch.setattr(module, key, _Kernel(key, self.names))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        views = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        if not views and name not in _NO_LAUNCH:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def _is_kernel(value: Any) -> bool:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    return isinstance(value, InterpretedFunction | JITFunction)


class _Kernel:
    """Stands for a kernel: `kernel[grid](*arguments)`."""

    def __init__(self, name: str, names: list[str]) -> None:
        self._name, self._names = name, names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            assert all(isinstance(size, int) and size > 0 for size in grid), f"{self._name} has the grid {grid}"
            limits = zip(grid, (2**31, 2**16, 2**16), strict=False)  # CUDA's
            assert all(size < limit for size, limit in limits), f"{self._name} has the grid {grid}, which is too large"
            devices = {value.device.type for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}
            assert devices == {"meta"}, f"{self._name} reads tensors on {devices}"
            self._names.append(self._name)

        return launch


def to_meta(thing: Any) -> Any:
    """`thing` with its tensors replaced, in place where it is a dataclass; modules are left to `Module.to`."""
    if isinstance(thing, Tensor):
        return torch.empty_like(thing, device="meta")
    if isinstance(thing, list | tuple):
        return type(thing)(map(to_meta, thing))
    if is_dataclass(thing) and not isinstance(thing, type):
        for field in fields(thing):
            object.__setattr__(thing, field.name, to_meta(getattr(thing, field.name)))
    return thing
