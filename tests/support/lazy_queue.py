"""A device that works as late as possible: at random moments, or when the host waits for an event after the work."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LazyQueue:
    """Implements `DeviceQueue`; writing a host buffer before its reader has run corrupts the reader's input."""

    def __init__(self, rng: random.Random, eagerness: float = 0.1) -> None:
        self._rng, self._eagerness = rng, eagerness
        self._work: deque[Callable[[], None]] = deque()
        self.most_waiting = 0
        self.num_waits = 0

    def submit(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        self.most_waiting = max(self.most_waiting, len(self._work))
        self.maybe_run()

    def event(self) -> LazyEvent:
        return LazyEvent(self)

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)

    def maybe_run(self) -> None:
        while self._work and self._rng.random() < self._eagerness:
            self.run_one()

    def run_one(self) -> None:
        self._work.popleft()()


class LazyEvent:
    def __init__(self, queue: LazyQueue) -> None:
        self._queue = queue
        self._recorded = False

    def record(self) -> None:
        self._recorded = True

    def query(self) -> bool:
        self._queue.maybe_run()
        return self._recorded

    def synchronize(self) -> None:
        self._queue.num_waits += not self._recorded
        while not self._recorded:
            self._queue.run_one()

    def elapsed_time(self, end: Any) -> float:
        assert self._recorded, "read before the device came there"
        assert end._recorded, "read before the device came there"
        return 1.0
