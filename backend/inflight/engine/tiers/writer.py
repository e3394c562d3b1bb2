"""Gives the tiers what requests compute, once no step in flight writes it.  No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from inflight.engine.events import DoneStep, EngineListener
from inflight.engine.request import Request, Status
from inflight.engine.step import SchedulerOutput
from inflight.engine.tiers.base import EngineTier
from inflight.engine.tiers.tiered_pool import TieredPool
from inflight.engine.tiers.tiers import Tiers

__all__ = ["TierWriter"]

_EVERY = 8  # steps between two looks at the running requests


class _Computed(NamedTuple):
    """An extent that is complete once step number `step` has run; `generations` are its blocks' as of then."""

    step: int
    request: Request
    block_hash: bytes
    blocks: list[int]
    generations: list[int]
    into: list[EngineTier]


class TierWriter(EngineListener):
    """Follows requests that have yielded a token or vector: until then nothing says that their KV is sound.

    The KV of a running request is kept while it runs, so that the next engine finds it if this one dies.  That of its
    prompt is in `Tiers.coming` before its first token leaves the engine: another one that continues it can ask then.
    Drafts are not kept, since their tokens are not the request's.
    """

    def __init__(self, tiers: Tiers, pool: TieredPool) -> None:
        self._tiers = tiers
        self._pool = pool
        self._extent_blocks = tiers.extent_blocks
        self._extent_tokens = tiers.extent_blocks * pool.block_size
        self._num_kept: dict[Request, int] = {}  # running request -> its leading extents that were looked at
        self._num_found: dict[Request, int] = {}  # running request -> tokens that it did not compute
        self._silent: dict[Request, None] = {}  # in order: those of them that have yielded no token yet
        self._computed: deque[_Computed] = deque()
        self._num_made = self._num_done = 0
        tiers.coming = lambda: [one.block_hash for one in list(self._computed)]

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        if request.caches_blocks:
            self._num_kept[request], self._num_found[request] = 0, request.num_computed_tokens
            self._silent[request] = None

    def step_begins(self, running: Sequence[Request]) -> None:
        if self._num_made % _EVERY == 0:
            for request, num_kept in self._num_kept.items():
                if request.num_tokens >= (num_kept + 1) * self._extent_tokens:
                    self._num_kept[request] = self._look_at(request, num_kept, self._extent_blocks)

    def _look_at_prompts(self) -> None:
        """Of requests that have just yielded their first token."""
        for request in [one for one in self._silent if one.num_tokens > one.num_given_tokens]:
            del self._silent[request]
            self._num_kept[request] = self._look_at(request, self._num_kept[request], self._extent_blocks)

    def left(self, request: Request) -> None:
        num_kept = self._num_kept.pop(request, None)
        if num_kept is not None:
            self._look_at(request, num_kept, self._tiers.part_blocks)
            del self._num_found[request]
            self._silent.pop(request, None)

    def ended(self, request: Request) -> None:
        self._send()

    def step_made(self, out: SchedulerOutput) -> None:
        self._num_made += 1

    def step_done(self, step: DoneStep) -> None:
        self._num_done += 1
        if step.result.failure or step.result.row_failures:  # its blocks were not computed, and others may share them
            self._computed.clear()
        else:
            self._look_at_prompts()
        self._send()

    step_failed = step_done

    def _look_at(self, request: Request, num_kept: int, shortest: int) -> int:
        """Note new extents, behind `num_kept`, of so many blocks at least; returns how many are whole."""
        if request.num_tokens <= request.num_given_tokens:
            return num_kept
        size, pool = self._extent_blocks, self._pool
        count = min(request.num_computed_tokens, request.num_tokens) // pool.block_size
        count -= count % size if count % size < shortest else 0
        hashes = pool.hashes(request, count)
        for start in range(num_kept * size, count, size):
            blocks = request.block_ids[start : min(start + size, count)]
            block_hash = hashes[start + len(blocks) - 1]
            is_computed = (start + len(blocks)) * pool.block_size > self._num_found[request]
            into = self._tiers.missing_in(block_hash, is_computed)
            if into:
                generations = [pool.generations[block] for block in blocks]
                self._computed.append(_Computed(self._num_made, request, block_hash, blocks, generations, into))
        return max(num_kept, count // size)

    def _send(self) -> None:
        generations = self._pool.generations
        while self._computed and self._computed[0].step <= self._num_done:
            _, request, block_hash, blocks, expected, into = self._computed[0]
            # Part of one only if its request has ended: it may be preempted often, and return to its whole extents.
            is_kept = len(blocks) == self._extent_blocks or request.status is Status.FINISHED
            if is_kept and [generations[block] for block in blocks] == expected:
                self._tiers.store(into, block_hash, blocks, generations)
            self._computed.popleft()  # it is queued now
