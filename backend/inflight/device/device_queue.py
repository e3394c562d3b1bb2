"""The order in which a device works: what is submitted runs later and in turn, and an event tells when it has run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["CudaQueue", "DeviceEvent", "DeviceQueue", "HostQueue", "queue_of"]


class DeviceEvent(Protocol):
    """A point in a queue; the methods are those of `torch.cuda.Event`."""

    def record(self) -> None:
        """Move the event to here: behind all work so far.  Called within submitted work."""

    def query(self) -> bool:
        """Whether the device has come this far."""

    def synchronize(self) -> None:
        """Wait until it has."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to `end`; the device has passed both."""


class DeviceQueue(Protocol):
    """One device's work, in order.

    `work` launches kernels and copies, reads no device tensor on the host, and changes nothing but device tensors,
    pinned buffers and what its caller gave it.  It runs at any time until an event behind it is waited for.
    """

    def submit(self, work: Callable[[], None]) -> None:
        """Queue `work`; an error while it is launched can be raised here."""

    def event(self) -> DeviceEvent:
        """A new event, not recorded."""

    def host_buffer(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] on the host, which copies from and to the device need not wait for."""


class CudaQueue:
    """The current stream: launches return at once, so work is launched when it is submitted."""

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def event(self) -> DeviceEvent:
        return torch.cuda.Event(enable_timing=True)

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class HostQueue:
    """A CPU: work is done when it is submitted."""

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def event(self) -> DeviceEvent:
        return _HostEvent()

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


class _HostEvent:
    def __init__(self) -> None:
        self._time = 0.0

    def record(self) -> None:
        self._time = time.monotonic()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _HostEvent) -> float:
        return 1e3 * (end._time - self._time)


def queue_of(device: torch.device) -> DeviceQueue:
    """The queue that a runner on `device` submits its steps to."""
    return CudaQueue() if device.type == "cuda" else HostQueue()
