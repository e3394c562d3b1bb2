"""Copies of adapters into slots of a GPU, on a stream of their own: steps that need not wait for one run beside it.

Events keep the order on the device, and the host waits for nothing.

    steps     a a b | a a | a a | a c a | c c
    copies           c into the slot of b

It begins behind the last step that read b, and the first one that reads c waits for it.

PyTorch's notes on CUDA semantics ("CUDA streams", "Use pinned memory buffers") describe the calls.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

__all__ = ["SlotCopies"]


class SlotCopies:
    """Called in the thread that launches steps, with their stream as the current one, never in a capture.

    Args:
        slots: [S, elements of a slot] on the device; what is queued so far may write them.
    """

    def __init__(self, slots: Tensor) -> None:
        self._slots = slots
        self._stream = torch.cuda.Stream(slots.device)
        self._free = [self._here()] * len(slots)  # behind the last step that read each slot
        self._reading: Collection[int] = ()  # slots that the step reads which was launched last
        self._is_ahead = False  # copies are queued that no step has waited for

    def step_begins(self) -> None:
        """The steps before it are launched."""
        if self._reading:
            behind = self._here()
            for slot in self._reading:
                self._free[slot] = behind
            self._reading = ()

    def fill(self, slot: int, values: Tensor) -> None:
        """Queue a copy of `values` [elements of a slot], pinned, behind the last step that read the slot."""
        self._is_ahead = True
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._free[slot])
            self._slots[slot].copy_(values, non_blocking=True)

    def step_reads(self, slots: Collection[int]) -> None:
        """The step that is launched next reads these slots, and waits for the copies into them."""
        self._reading = slots
        if self._is_ahead:
            torch.cuda.current_stream(self._slots.device).wait_stream(self._stream)
            self._is_ahead = False

    def written(self) -> None:
        """Work on the current stream has written slots: no copy runs before it."""
        self._free = [self._here()] * len(self._slots)

    def _here(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._slots.device))
        return event
