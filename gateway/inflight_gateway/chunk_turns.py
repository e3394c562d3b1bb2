"""The order in which an event loop does what is ready."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["ChunkTurns"]

_CHUNKS = 8  # that pass in a turn of the loop: what comes meanwhile waits for no more of them
# From the head of a request to the message to Triton, and from its first chunk to the client, the loop makes two
# turns, because each of the two hands over from one task to another.
_HURRY = 2
_MOST_HELD = 4  # turns without a chunk, however many requests begin


class ChunkTurns:
    """Chunks of outputs that run pass a few at a time, and none while a request begins.

    A step's chunks come in a burst, one of each stream, and each takes a tenth of a millisecond.  A task that became
    ready in that burst would wait for all of them, and again at each of its steps.  Used by one event loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None  # while `_pass` is scheduled
        self._hurry = 0
        self._held = 0

    def hurry(self) -> None:
        """A request or the first chunk of an output has come: chunks wait for the next turns of the loop."""
        self._hurry = _HURRY

    async def turn(self) -> None:
        """Wait until a chunk may pass, which is not before everything that is ready now has run."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiting.append(waiter)
        if self._loop is None:
            self._loop = loop
            loop.call_soon(self._pass)
        await waiter

    def _pass(self) -> None:
        assert self._loop is not None
        if self._hurry and self._held < _MOST_HELD:
            self._hurry -= 1
            self._held += 1
        else:
            self._held = 0
            for _ in range(min(_CHUNKS, len(self._waiting))):
                waiter = self._waiting.popleft()
                if not waiter.done():  # else its task was cancelled
                    waiter.set_result(None)
        if self._waiting:
            self._loop.call_soon(self._pass)
        else:
            self._loop = None
