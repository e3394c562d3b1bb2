"""CUDA graphs as torch makes them, on a memory pool of their own, and what is left of a capture that fails: nothing.

A pool that a capture has begun to fill must be ended and released, or torch believes that a capture is under way: then
`empty_cache` returns nothing to the device, and a step that runs out of memory does not recover.  torch before 2.12
does not end it if `capture_end` fails (pytorch/pytorch#180395), and 2.13 does not release it either (#190348).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.cuda.memory import _cuda_endAllocateToPool, _cuda_releasePool

__all__ = ["Capturer", "CudaCapturer", "Graph", "Launch", "capturer_of"]

# Launches a step and returns its outputs.
Launch = Callable[[], tuple[Tensor, ...]]


class Graph(Protocol):
    """A captured step.

    Attributes:
        outputs: what the step returned.  Each replay overwrites them, and the replay of another graph can.
    """

    outputs: tuple[Tensor, ...]

    def replay(self) -> None:
        """Queue the captured kernels on the current stream."""


class Capturer(Protocol):
    """Makes graphs: CUDA's, or a test's."""

    def warm_up(self, launch: Launch) -> None:
        """Run the launches, so that kernels are compiled and libraries have their workspaces.

        Raises:
            RuntimeError: the host waits for the device there, which a capture does not allow.
        """

    def capture(self, launch: Launch, beside: Graph | None) -> Graph:
        """Record the launches without running them; `beside` is a graph whose memory this one shares.

        Raises:
            RuntimeError: `launch` did what a graph cannot contain, such as reading a tensor on the host.
        """


class CudaCapturer:
    """Captures on a stream of its own, since the default one cannot be captured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def warm_up(self, launch: Launch) -> None:
        # On the stream of the captures: libraries keep a workspace for each stream, which must not come from the pool.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            launch()  # may wait, to compile or to allocate
            with _waits_raise():
                launch()
        torch.cuda.synchronize(self._device)  # the next warm-up may find the same buffers

    def capture(self, launch: Launch, beside: Graph | None) -> Graph:
        assert beside is None or isinstance(beside, _CudaGraph)
        pool = torch.cuda.MemPool() if beside is None else beside.pool
        graph, num_users = torch.cuda.CUDAGraph(), pool.use_count()
        handle: Any = pool.id  # has a type of its own in torch, but is the same
        torch.cuda.synchronize(self._device)  # queued work is not part of it
        with torch.cuda.stream(self._stream):
            try:
                graph.capture_begin(handle, capture_error_mode="thread_local")
                outputs = launch()
                graph.capture_end()
            except BaseException:
                _abandon(graph, pool, num_users)
                raise
        return _CudaGraph(graph, pool, tuple(map(_without_owning, outputs)))


@dataclass(slots=True)
class _CudaGraph:
    """Implements `Graph`."""

    graph: torch.cuda.CUDAGraph
    pool: torch.cuda.MemPool
    outputs: tuple[Tensor, ...]

    def replay(self) -> None:
        self.graph.replay()


class _Bytes:
    """A tensor's memory as `torch.as_tensor` takes it, by the CUDA array interface."""

    def __init__(self, tensor: Tensor) -> None:
        data = tensor.data_ptr(), False
        self.__cuda_array_interface__ = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": data, "version": 2}


def _without_owning(tensor: Tensor) -> Tensor:
    """The same memory.  The pool may give it to the next graph: the logits of all buckets would take a GiB."""
    if not tensor.is_contiguous():
        raise RuntimeError(f"an output of shape {list(tensor.shape)} is not contiguous")
    return torch.as_tensor(_Bytes(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)


def _abandon(graph: torch.cuda.CUDAGraph, pool: torch.cuda.MemPool, num_users: int) -> None:
    """End a capture that failed; `pool` had `num_users` before it."""
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # the error that made it fail is the one to report
        graph.capture_end()
    with contextlib.suppress(RuntimeError):  # it is not recording: it has been ended
        _cuda_endAllocateToPool(device, pool.id)
    graph.reset()
    if pool.use_count() > num_users:
        _cuda_releasePool(device, pool.id)


@contextlib.contextmanager
def _waits_raise() -> Iterator[None]:
    """An operation that waits for the device raises a RuntimeError."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch does not know of every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def capturer_of(device: torch.device) -> Capturer | None:
    """The capturer of `device`; None for a CPU."""
    return CudaCapturer(device) if device.type == "cuda" else None
