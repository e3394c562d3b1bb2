"""When a server that died may be started again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

__all__ = ["Restarts"]


class Restarts:
    """At most `limit` restarts within `window` seconds, with a pause before each that doubles.

    Args:
        limit: 0 for no restart at all.
        window: seconds after which a restart is forgotten.
        first_pause, longest_pause: seconds before the first of the restarts in the window, and at most.
        clock: seconds.
    """

    def __init__(
        self,
        limit: int,
        window: float = 600.0,
        first_pause: float = 0.5,
        longest_pause: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = limit
        self.window = window
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._clock = clock
        self._times: deque[float] = deque()

    def next_pause(self) -> float | None:
        """Count a restart; seconds to wait before it, or None if there were too many."""
        now = self._clock()
        while self._times and now - self._times[0] >= self.window:
            self._times.popleft()
        if len(self._times) >= self.limit:
            return None
        self._times.append(now)
        return min(self._longest_pause, self._first_pause * 2 ** (len(self._times) - 1))

    @property
    def count(self) -> int:
        """Restarts within the window."""
        return len(self._times)
