"""Puts an emulated card into this process, and takes it out again."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import threading
import types
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gpu_rounding import rounded_as_on_a_gpu
from quick_interpreter import quick_interpreter
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors

from emulated_card import graphs, streams
from emulated_card.card import Card
from emulated_card.device_guard import device_guard
from emulated_card.flash import flash_attention
from emulated_card.kernels import CheckedAccess, launch_kernel
from emulated_card.tensors import CUDA, CudaTensor, borrowed
from inflight.kernels.gpu import launch
from inflight.runner import capture

__all__ = ["emulated_card", "is_emulated"]

GIB = 2**30
_MODES = {"default": 0, "warn": 1, "error": 2}


def is_emulated() -> bool:
    """Whether this process has an emulated card now."""
    return streams.is_installed()


@contextlib.contextmanager
def emulated_card(
    total: int = GIB, capability: tuple[int, int] = (9, 0), num_sms: int = 2, rng: random.Random | None = None
) -> Iterator[Card]:
    """Within the block `torch.cuda` has one card; see the arguments of `Card`.

    It exists in this thread, and in threads that start within the block.  Tensors that outlive the block are only good
    for being deleted.
    """
    if torch.cuda.is_available():
        pytest.skip("there is a card already")
    _device_constructors()  # it remembers torch.tensor at its first call, which must be torch's own
    card = Card(total, capability, num_sms, rng)
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    with contextlib.ExitStack() as stack:
        streams.set_card(card)
        stack.callback(streams.set_card, None)
        stack.callback(card.allocator.close)
        for owner, names in _replacements(card).items():
            for name, value in names.items():
                stack.enter_context(patch.object(owner, name, value, create=True))
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(launch.can_launch.cache_clear)
        launch.can_launch.cache_clear()
        stack.enter_context(_kernels_on(card))
        stack.enter_context(device_guard())
        stack.enter_context(card.mode)
        stack.enter_context(torch.no_grad())  # torch without CUDA ends the process when it differentiates
        _set_aside_what_is_there()
        yield card


def _set_aside_what_is_there() -> None:
    """An engine that loads collects garbage a dozen times, and need not look at all that was there before."""
    if gc.isenabled():
        gc.collect()
        gc.freeze()


def _replacements(card: Card) -> dict[Any, dict[str, Any]]:
    """The attributes that the card replaces, by their owner."""
    pools = {
        "_cuda_endAllocateToPool": lambda device, pool: card.allocator.end(pool),
        "_cuda_releasePool": lambda device, pool: card.allocator.leave(pool),
    }
    return {
        torch.cuda: _cuda_of(card),
        torch: {name: _on_the_host_first(getattr(torch, name), card) for name in ("tensor", "as_tensor")},
        Tensor: {
            "to": _with_index(Tensor.to),
            "cuda": lambda self, device=None, non_blocking=False: self.to(CUDA, non_blocking=non_blocking),
            "pin_memory": lambda self, device=None: self if self in card.pinned else card.pinned_copy_of(self),
            "new_tensor": lambda self, data, dtype=None, device=None: torch.tensor(
                data, dtype=dtype or self.dtype, device=device or self.device
            ),
            "is_pinned": lambda self, device=None: not isinstance(self, CudaTensor) and self in card.pinned,
        },
        torch._C: pools,
        capture: pools,  # it has imported them by name
        threading.Thread: {"run": _in_mode(threading.Thread.run, card)},
    }


def _cuda_of(card: Card) -> dict[str, Any]:
    memory = card.allocator
    properties = types.SimpleNamespace(
        name="Emulated",
        major=card.capability[0],
        minor=card.capability[1],
        multi_processor_count=card.num_sms,
        shared_memory_per_block_optin=227 * 1024,
        total_memory=memory.total,
    )
    runtime = types.SimpleNamespace(cudaHostRegister=card.pinned.register, cudaHostUnregister=card.pinned.unregister)

    def reset_peak(device: Any = None) -> None:
        memory.peak, memory.peak_allocated = memory.reserved, memory.allocated

    def set_sync_debug_mode(mode: int | str) -> None:
        card.sync_debug_mode = _MODES[mode] if isinstance(mode, str) else mode

    def check_error(code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA error {code}")

    def stats(device: Any = None) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": memory.allocated,
            "allocated_bytes.all.peak": memory.peak_allocated,
            "reserved_bytes.all.current": memory.reserved,
            "reserved_bytes.all.peak": memory.peak,
            "num_ooms": memory.num_ooms,
        }

    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: card.capability,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "Event": streams.Event,
        "Stream": streams.Stream,
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "set_stream": card.set_stream,
        "current_stream": lambda device=None: card.current_stream(),
        "default_stream": lambda device=None: card.default_stream,
        "synchronize": card.synchronize,
        "CUDAGraph": graphs.CUDAGraph,
        "MemPool": graphs.MemPool,
        "graph": graphs.graph,
        "graph_pool_handle": graphs.new_pool,
        "is_current_stream_capturing": lambda: card.capture_of(card.current_stream()) is not None,
        "mem_get_info": lambda device=None: (memory.available - memory.reserved, memory.total),
        "memory_allocated": lambda device=None: memory.allocated,
        "memory_reserved": lambda device=None: memory.reserved,
        "max_memory_allocated": lambda device=None: memory.peak_allocated,
        "max_memory_reserved": lambda device=None: memory.peak,
        "reset_peak_memory_stats": reset_peak,
        "memory_stats": stats,
        "empty_cache": memory.release_cached,
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": lambda: card.sync_debug_mode,
        "check_error": check_error,
        "cudart": lambda: runtime,
        "manual_seed": card.seed,
        "manual_seed_all": card.seed,
        "get_rng_state": card.get_rng_state,
        "set_rng_state": card.set_rng_state,
    }


def _on_the_host_first(make: Any, card: Card) -> Any:
    """torch.tensor and torch.as_tensor hide from modes how they copy to a device."""

    @functools.wraps(make)
    def made(data: Any, *args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        place = _default_device() if device is None else torch.device(device)
        interface = None if isinstance(data, Tensor) else getattr(data, "__cuda_array_interface__", None)
        if interface is not None:
            return _at_address(card, interface)
        if isinstance(data, CudaTensor):
            return data.to(device=place or CUDA, **kwargs)
        if place is None or place.type != "cuda":
            tensor = make(data, *args, device=device, **kwargs)
            return tensor.pin_memory() if pin_memory else tensor
        return make(data, *args, device="cpu", **kwargs).to(CUDA)

    return made


def _default_device() -> torch.device | None:
    """That of the innermost `with torch.device(...)` or of `torch.set_default_device`; None if there is none."""
    modes = reversed(_get_current_function_mode_stack())
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


def _at_address(card: Card, interface: dict[str, Any]) -> Tensor:
    """The bytes at an address, as the CUDA array interface describes them, without owning them."""
    assert interface["typestr"] == "|u1", "other types are not emulated"
    address, (size,) = interface["data"][0], interface["shape"]
    return borrowed(card, card.allocator.bytes_at(address, size))


def _with_index(to: Any) -> Any:
    """`Tensor.to`, which would ask the driver for the index of "cuda"."""

    def fixed(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("cuda"):
            value = torch.device(value)
        return CUDA if isinstance(value, torch.device) and value.type == "cuda" else value

    @functools.wraps(to)
    def moved(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return to(self, *map(fixed, args), **{key: fixed(value) for key, value in kwargs.items()})

    return moved


def _in_mode(run: Any, card: Card) -> Any:
    """Threads that start while there is a card use it."""

    @functools.wraps(run)
    def in_mode(self: threading.Thread) -> None:
        with card.mode, torch.no_grad():
            run(self)

    return in_mode


@contextlib.contextmanager
def _kernels_on(card: Card) -> Iterator[None]:
    """Launches of kernels in the Triton language go to the card, if its package is there."""
    try:
        from triton.runtime import interpreter

        from inflight.kernels.gpu import gpu_pdl
    except ImportError:
        yield
        return

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch_kernel(card, self, args, kwargs, grid, warmup)

    def grid_barrier(builder: Any) -> None:  # plans outlive a card
        streams.current_card().access.wait()

    set_place = interpreter.InterpreterBuilder.set_grid_idx

    def begin_program(builder: Any, *place: int) -> None:
        card.access.program_begins()
        set_place(builder, *place)

    caches = property(lambda self: {0: (card.compiled.setdefault(self, {}),)})
    card.access = CheckedAccess(interpreter._interpreter)
    with (
        rounded_as_on_a_gpu(),
        quick_interpreter(),
        patch.object(interpreter.InterpretedFunction, "run", run),
        patch.object(interpreter.InterpretedFunction, "device_caches", caches, create=True),
        patch.object(interpreter, "_interpreter", card.access),
        patch.object(interpreter.InterpreterBuilder, "set_grid_idx", begin_program),
        patch.object(interpreter.InterpreterBuilder, "grid_barrier", grid_barrier, create=True),
        patch.multiple(
            gpu_pdl,
            interpreted=lambda: False,
            gdc_wait=lambda: interpreter.interpreter_semantic.builder.grid_barrier(),
            gdc_launch_dependents=lambda: None,  # the next kernel starts when this one has ended
        ),
        flash_attention(),
    ):
        yield
