"""First come, first served, with vectors in a line of their own.  Pure Python, no torch.

One request for vectors can bring thousands of texts, each a request of the engine.  In one line, a chat that arrives
behind them waits for all of them.  Here texts for vectors and requests for text wait in two lines, each in the order
of arrival.  While both have requests, they take turns, so that neither line starves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest

from inflight.engine.events import EngineListener
from inflight.engine.policies.defaults import FcfsOrder
from inflight.engine.request import Request

__all__ = ["VectorsBeside"]


class VectorsBeside(EngineListener):
    """Implements `OrderPolicy`.  Without requests for vectors it is `FcfsOrder`."""

    def __init__(self) -> None:
        self._texts, self._vectors = FcfsOrder(), FcfsOrder()
        self._vectors_next = False  # the last one admitted was a text

    def __len__(self) -> int:
        return len(self._texts) + len(self._vectors)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._texts, self._vectors)

    def __contains__(self, request: object) -> bool:
        return request in self._texts or request in self._vectors

    def add(self, request: Request) -> None:
        self._line(request).add(request)

    def add_first(self, request: Request) -> None:
        self._line(request).add_first(request)

    def next_requests(self, limit: int) -> list[Request]:
        lines = self._texts.next_requests(limit), self._vectors.next_requests(limit)
        return _in_turn(*reversed(lines) if self._vectors_next else lines)[:limit]

    def remove(self, request: Request) -> None:
        self._line(request).remove(request)

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        self._vectors_next = self._line(request) is self._texts

    def ahead(self, request: Request) -> list[Request]:
        own, other = self._lines(request)
        mine, turn = own.ahead(request), own is (self._vectors if self._vectors_next else self._texts)
        return [*mine, *other.next_requests(len(mine) + (not turn))]

    def goes_before(self, request: Request, other: Request) -> bool:
        return False  # requests out of the queue have no order

    def position(self, request: Request, running: Sequence[Request]) -> int:
        return len(running)

    def outranked(self, request: Request, running: Sequence[Request]) -> Iterator[Request]:
        return iter(())

    def _line(self, request: Request) -> FcfsOrder:
        return self._lines(request)[0]

    def _lines(self, request: Request) -> tuple[FcfsOrder, FcfsOrder]:
        """The request's own line, and the other."""
        is_vector = request.attached is not None and request.attached.pooling is not None
        return (self._vectors, self._texts) if is_vector else (self._texts, self._vectors)


def _in_turn(first: list[Request], second: list[Request]) -> list[Request]:
    """One of each, while both last."""
    return [request for pair in zip_longest(first, second) for request in pair if request is not None]
