"""CUDA graphs of an emulated card: a capture records what would be launched, and runs none of it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from emulated_card import streams
from emulated_card.memory import Allocation, Pool

if TYPE_CHECKING:
    from emulated_card.card import Card

__all__ = ["GRAPH_BYTES", "CUDAGraph", "Capture", "MemPool", "graph", "new_pool"]

GRAPH_BYTES = 64 * 1024  # that the driver takes for a captured graph, besides the memory of its tensors

_numbers = count(1)
_INVALIDATED = "CUDA error: operation failed due to a previous error during capture"


def new_pool() -> tuple[int, int]:
    """`torch.cuda.graph_pool_handle`"""
    return 0, next(_numbers)


class MemPool:
    """Implements `torch.cuda.MemPool`: a pool with one user more than its graphs."""

    def __init__(self) -> None:
        self.id = new_pool()
        self._allocator = streams.current_card().allocator
        self._pool = self._allocator.pool_of(self.id)
        self._pool.users += 1

    def use_count(self) -> int:
        return self._pool.users

    def __del__(self) -> None:
        self._allocator.leave(self.id)


class Capture:
    """One capture, from begin to end.

    Attributes:
        streams: whose launches it records: the one it began on, and streams that waited for it.
        works: what a replay does, in order.
        is_valid: nothing was done that a capture cannot contain.
    """

    def __init__(self, card: Card, pool: Pool) -> None:
        self.card, self.pool = card, pool
        self.origin = card.current_stream()
        self.streams = {self.origin}
        self.thread = threading.get_ident()
        self.works: list[Callable[[], None]] = []
        self.is_valid = self.is_active = True
        self._inputs: dict[int, weakref.ref[Allocation]] = {}

    def record(self, work: Callable[[], None], used: Iterable[Allocation] = ()) -> None:
        if not self.is_valid:
            raise RuntimeError(_INVALIDATED)
        self.works.append(work)
        for allocation in used:
            if allocation.capture is not self:
                self._inputs[id(allocation)] = weakref.ref(allocation)

    def check_inputs(self) -> None:
        """Raises RuntimeError if memory that the graph uses was freed: CUDA would read its present contents."""
        if any(ref() is None for ref in self._inputs.values()):
            raise RuntimeError("a CUDA graph uses memory that was freed after its capture")


class CUDAGraph:
    """Implements `torch.cuda.CUDAGraph`.

    A capture that failed leaves the allocator as torch before 2.12 leaves it: the pool is still being allocated to, so
    that no memory is released until `torch._C._cuda_endAllocateToPool` is called.

    Attributes:
        num_replays: which torch does not count.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self._card = streams.current_card()
        self._capture: Capture | None = None
        self._key: tuple[int, int] | None = None
        self.num_replays = 0

    def capture_begin(
        self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global", **others: Any
    ) -> None:
        card = self._card
        if card.current_stream() is card.default_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if card.capture is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        shared = card.allocator.pool_of(pool or new_pool())
        shared.users += 1
        card.allocator.underway.append(shared.key)
        self._capture = card.capture = Capture(card, shared)

    def capture_end(self) -> None:
        card, capture = self._card, self._capture
        if capture is None or card.capture is not capture:
            raise RuntimeError("CUDA error: the stream is not being captured")
        card.capture = None
        capture.is_active = False
        if not capture.is_valid:
            self._capture = None
            capture.works.clear()
            raise RuntimeError(_INVALIDATED)
        card.allocator.end(capture.pool.key)
        card.allocator.driver += GRAPH_BYTES
        self._key = capture.pool.key

    def replay(self) -> None:
        capture, card = self._capture, self._card
        if capture is None or self._key is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        capture.check_inputs()
        destroyed = [fill for owner, fill in capture.pool.leftovers if owner is not capture]
        works = capture.works

        def run() -> None:
            for work in (*destroyed, *works):
                work()

        card.launch(run)
        card.num_replays += 1
        self.num_replays += 1

    def pool(self) -> tuple[int, int]:
        if self._key is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._key

    def reset(self) -> None:
        if self._key is not None and self._capture is not None:
            pool = self._capture.pool
            pool.leftovers[:] = [(owner, fill) for owner, fill in pool.leftovers if owner is not self._capture]
            self._card.allocator.leave(self._key)
            self._card.allocator.driver -= GRAPH_BYTES
            self._key = self._capture = None

    def __del__(self) -> None:
        self.reset()


class graph:
    """Implements `torch.cuda.graph`."""

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: tuple[int, int] | None = None,
        stream: streams.Stream | None = None,
        capture_error_mode: str = "global",
        **others: Any,
    ) -> None:
        self._graph, self._pool, self._mode = cuda_graph, pool, capture_error_mode
        self._stream = stream or streams.Stream()

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._stream.__enter__()
        self._graph.capture_begin(self._pool, self._mode)

    def __exit__(self, *error: object) -> None:
        self._graph.capture_end()  # if it raises, the stream stays the current one, as with torch's
        self._stream.__exit__(*error)
