"""Swaps the KV blocks of preempted requests to host memory, where that is cheaper than recomputing them.

    preempted:  unshared blocks [S, H) -> host blocks    other requests hold the S leading ones
    readmitted: [0, D) from the prefix cache, [max(S, D), H) from the host, if D >= S; the rest is computed

This is bookkeeping; the copies travel in `SchedulerOutput.swap_out` and `swap_in`, and the runner makes
them.  Every host block is free or held by one waiting request.  vLLM's paper compares swapping with
recomputation (arXiv:2309.06180, section 7.3).  Pure Python, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from inflight.engine.events import DoneStep, EngineListener
from inflight.engine.kv_pool import KVPool
from inflight.engine.request import Request
from inflight.engine.step import SchedulerOutput

__all__ = ["RecomputeCost", "SwapSpace"]


class RecomputeCost(Protocol):
    """The time to compute KV again, learned from the steps."""

    def seconds(self, start: int, end: int) -> float:
        """To compute the tokens from position `start` to `end` of a request."""

    def step_done(self, step: DoneStep) -> None:
        """See `EngineListener`."""


@dataclass(slots=True)
class _Held:
    """The host blocks of a waiting request.

    Attributes:
        first: index of the first block in its block table.
        blocks: host blocks, one for each index from `first` on.
        num_computed_tokens: tokens whose KV is in the first `first + len(blocks)` blocks.
    """

    first: int
    blocks: list[int]
    num_computed_tokens: int


class SwapSpace(EngineListener):
    """Host blocks, and the choice between swap and recompute.

    Args:
        num_blocks: blocks that the host memory holds; 0: KV is always computed again.
        block_size: tokens in a block.
        seconds_per_block: to copy one block out and in again, as the runner measured it.
        cost: swap only where computing again costs more than copying both ways; None: whenever there is room.

    Attributes:
        num_swapped_out, num_swapped_in: blocks copied, ever.
    """

    def __init__(
        self, num_blocks: int, block_size: int, seconds_per_block: float = 0.0, cost: RecomputeCost | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.seconds_per_block = seconds_per_block
        self.num_swapped_out = 0
        self.num_swapped_in = 0
        self._cost = cost
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._held: dict[Request, _Held] = {}
        # Of the step that is being made: it must copy a host block in before the block is overwritten.
        self._copies_out: dict[int, int] = {}
        self._returning: list[int] = []

    @property
    def num_used(self) -> int:
        """Host blocks that waiting requests hold."""
        return self.num_blocks - len(self._free) - len(self._returning)

    def swap_out(self, request: Request, pool: KVPool) -> None:
        """Copy out a request's computed KV, if that is cheaper, before `pool` takes its blocks.

        Blocks that other requests share stay in the pool and need no copy.  If the host has too little room, the
        tail is recomputed.
        """
        if not self._free or (request.attached is not None and request.attached.pooling is not None):
            return  # the sums of a mean are not in the KV
        first = pool.num_shared(request)
        computed = request.num_computed_tokens
        count = min(pool.blocks_for(computed) - first, len(self._free))
        if count <= 0:
            return
        computed = min(computed, (first + count) * self.block_size)
        cost, copies = self._cost, count * self.seconds_per_block
        if cost is not None and cost.seconds(first * self.block_size, computed) <= copies:
            return
        blocks = [self._free.pop() for _ in range(count)]
        self._held[request] = _Held(first, blocks, computed)
        self.num_swapped_out += count
        self._copies_out.update(zip(blocks, request.block_ids[first : first + count]))

    def step_done(self, step: DoneStep) -> None:
        if self._cost is not None:
            self._cost.step_done(step)

    def send(self, out: SchedulerOutput) -> None:
        """Give the pending copies to the step that was just made; a step without rows is not executed."""
        if self._returning:
            self._free += self._returning
            self._returning = []
        if self._copies_out and out.slots:
            out.swap_out, self._copies_out = self._copies_out, {}

    def num_resumable(self, request: Request, num_cached: int) -> int:
        """Leading tokens that a waiting request can skip, given `num_cached` blocks of the prefix cache."""
        held = self._held.get(request) if self._held else None
        if held is None or num_cached < held.first:
            return num_cached * self.block_size
        return max(num_cached * self.block_size, held.num_computed_tokens)

    def swap_in(self, request: Request, num_cached: int) -> list[int]:
        """Host blocks to copy into the request's blocks from index `num_cached` on, in the step being made.

        Its host blocks are free for the steps after that one.
        """
        held = self._held.pop(request, None)
        if held is None:
            return []
        self._returning += reversed(held.blocks)
        wanted = held.blocks[num_cached - held.first :] if num_cached >= held.first else []
        self.num_swapped_in += len(wanted)
        return wanted

    def ended(self, request: Request) -> None:
        """Free the host blocks of a request that ended while it waited."""
        held = self._held.pop(request, None)
        if held is not None:
            self._free += reversed(held.blocks)

    def check_integrity(self, waiting: Iterable[Request]) -> None:
        """Assert that every host block is exactly once free or held, and held by a waiting request."""
        held = [block for entry in self._held.values() for block in entry.blocks]
        assert not self._returning, "a step was made, and host blocks did not return"
        assert sorted([*self._free, *held]) == list(range(self.num_blocks)), "a host block is lost or in two places"
        assert self._held.keys() <= set(waiting), "host blocks are held by a request that does not wait"
