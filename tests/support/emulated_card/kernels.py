"""Kernels in the Triton language on an emulated card: the interpreter runs them when the stream comes to them.

A launch checks what a GPU checks: arguments on the card, the size of the grid, that nothing is compiled during a
capture.  A load or store outside of the memory of the launch's tensors is an illegal access.

With `launch_pdl` a kernel starts while the one before it runs (`kernels/gpu/gpu_pdl.py`).  Here it starts when that one
has ended, so what would be a race is an error: a program that accesses memory before it waits, or never waits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from triton.runtime import interpreter

from emulated_card.memory import Allocation
from emulated_card.tensors import CudaTensor

if TYPE_CHECKING:
    from emulated_card.card import Card

__all__ = ["GRID_LIMITS", "CheckedAccess", "launch_kernel"]

GRID_LIMITS = (2**31 - 1, 65535, 65535)
_COMPILED = SimpleNamespace(n_regs=128, metadata=SimpleNamespace(shared=64 * 1024))
_FIRST_WITH_PDL = (9, 0)
_ALIGNMENT = 16  # the compiler takes pointers and integers that are multiples of it for a kind of their own


def launch_kernel(card: Card, kernel: Any, args: Any, kwargs: Any, grid: Any, warmup: bool) -> Any:
    """`kernel[grid](*args, **kwargs)`.  Returns what the compiler would say of the kernel."""
    names = dict(zip(kernel.arg_names, args)) | kwargs
    executor = interpreter.GridExecutor(kernel.rewrite(), kernel.arg_names, None, kernel.pre_run_hooks)
    _compile(card, kernel, names, executor.constexprs)
    if warmup:
        return _COMPILED
    sizes = tuple(grid(names) if callable(grid) else grid)
    if any(size > limit for size, limit in zip(sizes, GRID_LIMITS)):
        raise RuntimeError(f"Triton Error [CUDA]: invalid argument (a grid of {sizes} for {kernel.__name__})")
    if not math.prod(sizes):
        return _COMPILED
    used: list[Allocation] = []
    reachable: list[Tensor] = []

    def on_card(position: int, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, CudaTensor):
            if value.memory is not None:
                used.append(value.memory)
            reachable.append(value.inner)
            return value.inner
        if value.device.type == "cpu" and value in card.pinned:
            reachable.append(value)
            return value
        raise ValueError(f"Pointer argument (at {position}) cannot be accessed from Triton (cpu tensor?)")

    inner_args = [on_card(i, value) for i, value in enumerate(args)]
    inner_kwargs = {key: on_card(len(args) + i, value) for i, (key, value) in enumerate(kwargs.items())}
    executor.grid = sizes
    # The arguments are on the host already, and each call would copy whole pools to themselves.
    executor._init_args_hst = lambda args, kwargs: (args, kwargs)
    executor._restore_args_dev = lambda *args: None
    ranges = [(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in reachable]
    is_dependent = bool(kwargs.get("launch_pdl"))
    if is_dependent and card.capability < _FIRST_WITH_PDL:
        raise RuntimeError(f"PTXAS error: griddepcontrol of {kernel.__name__} requires .target sm_90 or higher")

    def run() -> None:
        with card.access.of_kernel(ranges, is_dependent):
            executor(*inner_args, **inner_kwargs)

    card.launch(run, used)
    return _COMPILED


def _compile(card: Card, kernel: Any, names: dict[str, Any], constants: list[str]) -> None:
    """The first launch with arguments of some kinds; loading its code is forbidden in a capture."""
    general, unaligned = (
        {kernel.arg_names[item] if isinstance(item, int) else item for item in kernel.kwargs.get(option) or ()}
        for option in ("do_not_specialize", "do_not_specialize_on_alignment")
    )
    key = tuple(
        (name, value if name in constants else _kind(value, name not in general, name not in general | unaligned))
        for name, value in names.items()
    )
    known = card.compiled.setdefault(kernel, {})
    if key not in known:
        card.forbid_in_capture(f"compiling the kernel {kernel.__name__}")
        known[key] = True


def _kind(value: Any, has_values: bool, has_alignment: bool) -> Any:
    """The part of an argument that the compiler uses: its type, and unless told otherwise more."""
    if isinstance(value, Tensor):
        return value.dtype, has_alignment and value.data_ptr() % _ALIGNMENT == 0
    if isinstance(value, int) and not isinstance(value, bool):
        fits = -(2**31) <= value < 2**31
        return "int", fits, has_values and value == 1, has_alignment and value % _ALIGNMENT == 0
    return type(value)


class CheckedAccess:
    """Takes the place of the interpreter's memory accesses, and is told when a program begins and waits."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._ranges: list[tuple[int, int]] = []  # of the running kernel; empty: it is not the card's
        self._is_dependent = False
        self._is_free = True  # the running program has waited, or need not

    @contextlib.contextmanager
    def of_kernel(self, ranges: list[tuple[int, int]], is_dependent: bool) -> Iterator[None]:
        """While a kernel runs.

        Args:
            ranges: address and bytes of the memory that it has pointers to.
            is_dependent: its programs must wait for the kernel before it.
        """
        self._ranges, self._is_dependent = ranges, is_dependent
        try:
            yield
            self.program_begins()
        finally:
            self._ranges, self._is_dependent, self._is_free = [], False, True

    def program_begins(self) -> None:
        """And the one before it has ended."""
        if not self._is_free:
            raise RuntimeError("a program of a kernel with launch_pdl did not wait for the kernel before it (gdc_wait)")
        self._is_free = not self._is_dependent

    def wait(self) -> None:
        """`gdc_wait`"""
        self._is_free = True

    def load(self, ptrs: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._check(ptrs, mask, np.dtype(dtype).itemsize, "read")
        return self._real.load(ptrs, mask, other, dtype)

    def store(self, ptrs: Any, value: Any, mask: Any) -> Any:
        self._check(ptrs, mask, value.dtype.itemsize, "write")
        return self._real.store(ptrs, value, mask)

    def atomic_rmw(self, operation: Any, ptrs: Any, value: Any, mask: Any, sem: Any) -> Any:
        self._check(ptrs, mask, value.dtype.itemsize, "update")
        return self._real.atomic_rmw(operation, ptrs, value, mask, sem)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _check(self, ptrs: Any, mask: Any, size: int, what: str) -> None:
        if not self._ranges:
            return
        if not self._is_free:
            raise RuntimeError(f"a race: a program wants to {what} before it waits for the kernel before it (gdc_wait)")
        used = ptrs[np.broadcast_to(mask, ptrs.shape).astype(bool)]
        if not used.size:
            return
        low, high = int(used.min()), int(used.max()) + size
        if any(start <= low and high <= start + length for start, length in self._ranges):
            return
        fits = np.zeros(used.shape, dtype=bool)
        for start, length in self._ranges:
            fits |= (used >= start) & (used + size <= start + length)
        if not fits.all():
            raise RuntimeError(f"an illegal memory access: a kernel wants to {what} at {int(used[~fits][0]):#x}")
