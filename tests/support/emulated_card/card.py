"""The state of an emulated card: streams, waits of the host, memory, random numbers."""

from __future__ import annotations

import random
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from emulated_card.graphs import Capture
from emulated_card.memory import Allocation, Allocator, PinnedMemory
from emulated_card.operations import dispatch
from emulated_card.streams import Stream

__all__ = ["Card"]


class _Mode(TorchDispatchMode):
    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler, for seconds, to keep it away from the method below."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._card.dispatch(func, args, kwargs or {})


class Card:
    """The state of one emulated card.

    Args:
        total: bytes of its memory.
        capability: compute capability.
        num_sms: its multiprocessors.
        rng: lets the card work at random moments, too; None: it works only when the host waits.

    Attributes:
        num_waits: how often the host waited for work that had not been done.
        num_replays: of graphs.
        launched_at_once: operations that cannot run late here, with their number.
        fault: the error of the card's work; every later call reports it.
    """

    def __init__(self, total: int, capability: tuple[int, int], num_sms: int, rng: random.Random | None) -> None:
        self.capability, self.num_sms = capability, num_sms
        self.lock = threading.RLock()
        self.pinned = PinnedMemory()
        self.capture: Capture | None = None
        self.compiled: dict[Any, dict[Any, bool]] = {}
        self.access: Any = None
        self.sync_debug_mode = 0
        self.num_waits = self.num_replays = 0
        self.launched_at_once: Counter[str] = Counter()
        self.fault: Exception | None = None
        self._rng = rng
        self._num_streams = 0
        self._streams: list[Stream] = []
        self._local = threading.local()
        self._random_state = torch.Generator().manual_seed(0).get_state()
        self.allocator = Allocator(total, self.launch, self.drain)
        self.default_stream = Stream(card=self)

    @property
    def mode(self) -> TorchDispatchMode:
        """Sends operations to the card; a new one, since each can be entered once at a time."""
        return _Mode(self)

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation of torch, if it concerns the card."""
        return dispatch(self, func, args, kwargs)

    # -- streams ----------------------------------------------------------------------------------

    def next_stream_id(self) -> int:
        self._num_streams += 1
        return self._num_streams - 1

    def current_stream(self) -> Stream:
        return getattr(self._local, "stream", None) or self.default_stream

    def set_stream(self, stream: Stream) -> None:
        self._local.stream = stream

    def capture_of(self, stream: Stream) -> Capture | None:
        """The capture that records the stream's launches."""
        return self.capture if self.capture is not None and stream in self.capture.streams else None

    def push(self, stream: Stream, work: Callable[[], None], used: Iterable[Allocation] = ()) -> None:
        capture = self.capture_of(stream)
        if capture is not None:
            capture.record(work, used)
        else:
            stream.push(work)

    def launch(self, work: Callable[[], Any], used: Iterable[Allocation] = ()) -> None:
        """Queue work on the current stream; `used` is the memory that it reads or writes."""
        self.push(self.current_stream(), work, used)

    def run_at_random(self, stream: Stream) -> None:
        while self._rng is not None and stream.done < stream.submitted and self._rng.random() < 0.1:
            stream.run_to(stream.done + 1)

    def drain(self) -> None:
        with self.lock:
            for stream in self._streams:
                stream.run_to(stream.submitted)

    def add_stream(self, stream: Stream) -> None:
        self._streams.append(stream)

    # -- waits ------------------------------------------------------------------------------------

    def wait(self, what: str, stream: Stream | None = None) -> None:
        """The host waits for a stream, by default the current one.

        Raises:
            RuntimeError: in a capture, or under `set_sync_debug_mode("error")`.
        """
        stream = stream or self.current_stream()
        self.forbid_in_capture(what)
        if self.sync_debug_mode == 2:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
        if self.sync_debug_mode == 1:
            warnings.warn(f"called a synchronizing CUDA operation: {what}", stacklevel=3)
        self.num_waits += stream.done < stream.submitted
        stream.run_to(stream.submitted)

    def forbid_in_capture(self, what: str) -> None:
        """Ends a capture of this thread, which cannot contain `what`."""
        if self.capture is not None and self.capture.thread == threading.get_ident():
            self.capture.is_valid = False
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")

    def synchronize(self, device: Any = None) -> None:
        self.forbid_in_capture("torch.cuda.synchronize")
        self.num_waits += any(stream.done < stream.submitted for stream in self._streams)
        self.drain()

    def raise_fault(self) -> None:
        if self.fault is not None:
            raise RuntimeError(f"CUDA error: device-side assert triggered: {self.fault}") from self.fault

    # -- memory -----------------------------------------------------------------------------------

    def allocate(self, num_bytes: int, dtype: torch.dtype) -> Allocation:
        capture = self.capture
        if capture is not None and capture.thread != threading.get_ident():
            capture = None
        return self.allocator.allocate(num_bytes, dtype, capture)

    def pinned_copy_of(self, tensor: Tensor) -> Tensor:
        """A pinned tensor of the same shape, with the same contents if they have any."""
        return self.pinned.add(tensor.clone())

    # -- random numbers ---------------------------------------------------------------------------

    def with_random_state(self, work: Callable[[], Any]) -> Any:
        """Draw from the card's generator."""
        kept = torch.get_rng_state()
        torch.set_rng_state(self._random_state)
        try:
            return work()
        finally:
            self._random_state = torch.get_rng_state()
            torch.set_rng_state(kept)

    def seed(self, seed: int) -> None:
        self.drain()
        self._random_state = torch.Generator().manual_seed(seed).get_state()

    def get_rng_state(self, device: Any = None) -> Tensor:
        self.drain()
        return self._random_state.clone()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self.drain()
        self._random_state = state.clone()
