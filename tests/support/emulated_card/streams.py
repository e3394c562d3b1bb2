"""Streams of an emulated card: work runs as late as possible, in the order of its stream.

Nothing runs until the host waits for it, or a stream is as long as CUDA lets it be.  A program that reads results too
early, or overwrites what a copy has still to read, therefore always sees wrong values.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from emulated_card.card import Card

__all__ = ["Event", "Stream", "current_card", "device_side", "is_installed", "set_card"]

_LONGEST = 1024  # launches that a stream holds before the host has to wait


def device_side() -> Any:
    """A context in which no mode of the host sees, or changes, what the card does.

    Every operation enters it, so it is torch's own wherever no other mode is in effect.
    """
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return _without_modes()
    return torch._C._InferenceMode(True)


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), torch._C._InferenceMode(True), _disable_current_modes():
        yield


class Stream:
    """Implements `torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, card: Card | None = None) -> None:
        self.card = card or current_card()
        self.device = torch.device("cuda:0")
        self.stream_id = self.cuda_stream = self.card.next_stream_id()
        self.priority = priority
        self._work: deque[Callable[[], None]] = deque()
        self.submitted = self.done = 0
        self._outer: list[Stream] = []
        self.card.add_stream(self)

    def push(self, work: Callable[[], None]) -> None:
        with self.card.lock:
            self._work.append(work)
            self.submitted += 1
            if self.submitted - self.done > _LONGEST:
                self.run_to(self.done + 1)
            self.card.run_at_random(self)

    def run_to(self, number: int) -> None:
        """Do the stream's work up to the `number`-th."""
        with self.card.lock:
            self.card.raise_fault()
            if self.done >= number:
                return
            with device_side():
                while self.done < number:
                    work = self._work.popleft()
                    self.done += 1
                    try:
                        work()
                    except Exception as error:
                        self.card.fault = error
                        self.card.raise_fault()

    def synchronize(self) -> None:
        self.card.wait("Stream.synchronize", self)

    def query(self) -> bool:
        self.card.forbid_in_capture("Stream.query")
        if self.done < self.submitted:
            self.run_to(self.done + 1)
            return False
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def __enter__(self) -> Stream:
        self._outer.append(self.card.current_stream())
        self.card.set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.card.set_stream(self._outer.pop())


class Event:
    """Implements `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **others: Any) -> None:
        self._card = current_card()
        self._has_times = enable_timing
        self._stream: Stream | None = None
        self._number = 0
        self._capture: Any = None
        self._time: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._card.current_stream()
        self._stream, self._time = stream, None
        self._capture = self._card.capture_of(stream)
        if self._capture is not None:
            return
        number = self._number = stream.submitted + 1

        def reached() -> None:
            if self._number == number:
                self._time = time.monotonic()

        stream.push(reached)

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or self._card.current_stream()
        if self._capture is not None and self._capture.is_active:
            self._capture.streams.add(stream)
            return
        other, number = self._stream, self._number
        if other is not None and other is not stream:
            self._card.push(stream, lambda: other.run_to(number))

    def query(self) -> bool:
        self._card.forbid_in_capture("Event.query")
        if self._stream is None:
            return True
        if self._stream.done >= self._number:
            self._card.raise_fault()
            return True
        self._stream.run_to(self._stream.done + 1)  # time passes
        return False

    def synchronize(self) -> None:
        self._card.forbid_in_capture("Event.synchronize")
        if self._stream is not None:
            self._card.num_waits += self._stream.done < self._number
            self._stream.run_to(self._number)

    def elapsed_time(self, end: Event) -> float:
        if not (self._has_times and end._has_times):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._stream is None or end._stream is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if self._time is None or end._time is None:
            raise RuntimeError("CUDA error: device not ready")
        return 1e3 * (end._time - self._time)


_card: Card | None = None


def current_card() -> Card:
    """The card that is installed."""
    if _card is None:
        raise RuntimeError("no emulated card is installed")
    return _card


def set_card(card: Card | None) -> None:
    """The card of new streams and events."""
    global _card
    _card = card


def is_installed() -> bool:
    return _card is not None
