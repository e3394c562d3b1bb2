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

_EVERY = 8  # steps between two looks at a running request; requests take turns by their ids


class _Computed(NamedTuple):
    """An extent that is complete once step number `step` has run; `generations` are its blocks' as of then."""

    step: int
    request: Request
    key: bytes
    blocks: list[int]
    generations: list[int]
    into: list[EngineTier]


class TierWriter(EngineListener):
    """Keeps KV of requests that have yielded a token or vector: until then nothing says that it is sound.

    The KV of a running request is kept while it runs, so that the next engine finds it if this one dies.  That of its
    prompt is `Tiers.coming` before its first token leaves the engine: another one that continues it can ask then.
    If a step or row fails, what waits for a step is given up, that of others, too.  Drafts' KV is not the request's.
    """

    def __init__(self, tiers: Tiers, pool: TieredPool) -> None:
        self._tiers, self._pool = tiers, pool
        self._extent_blocks = tiers.extent_blocks
        self._extent_tokens = tiers.extent_blocks * pool.block_size
        self._num_kept: dict[Request, int] = {}  # running request -> its leading extents that were looked at
        self._num_found: dict[Request, int] = {}  # running request -> tokens that it did not compute
        self._silent: dict[Request, None] = {}  # in order: those of them that have yielded no token yet
        self._computed: deque[_Computed] = deque()
        self._coming: dict[bytes, _Computed] = {}  # the same, by key
        self._num_made = self._num_done = 0
        tiers.coming = self._is_coming

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        if request.caches_blocks:
            self._num_kept[request], self._num_found[request] = 0, request.num_computed_tokens
            self._silent[request] = None

    def step_begins(self, running: Sequence[Request]) -> None:
        for request, num_kept in self._num_kept.items():
            is_turn = (self._num_made + request.request_id + request.index) % _EVERY == 0
            if is_turn and request not in self._silent and request.num_tokens >= (num_kept + 1) * self._extent_tokens:
                self._num_kept[request] = self._look_at(request, num_kept, self._extent_blocks)

    def left(self, request: Request) -> None:
        num_kept = self._num_kept.pop(request, None)
        if num_kept is not None:
            self._look_at(request, num_kept, self._tiers.part_blocks)  # its first token may be in flight
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
            self._coming.clear()
        else:
            for request in [one for one in self._silent if one.num_tokens > one.num_given_tokens]:
                del self._silent[request]
                self._num_kept[request] = self._look_at(request, self._num_kept[request], self._extent_blocks)
        self._send()

    step_failed = step_done

    def _look_at(self, request: Request, num_kept: int, shortest: int) -> int:
        """Note new extents, behind `num_kept`, of so many blocks at least; returns how many are whole."""
        size, pool = self._extent_blocks, self._pool
        count = min(request.num_computed_tokens, request.num_tokens) // pool.block_size
        count -= count % size if count % size < shortest else 0
        hashes = pool.hashes(request, count)
        for start in range(num_kept * size, count, size):
            blocks = request.block_ids[start : min(start + size, count)]
            key = self._tiers.seal.key_of(hashes[start + len(blocks) - 1])
            is_computed = (start + len(blocks)) * pool.block_size > self._num_found[request]
            if into := self._tiers.missing_in(key, is_computed):
                generations = [pool.generations[block] for block in blocks]
                self._coming[key] = one = _Computed(self._num_made, request, key, blocks, generations, into)
                self._computed.append(one)
        return max(num_kept, count // size)

    def _is_coming(self, tier: EngineTier, key: bytes) -> bool:
        return (one := self._coming.get(key)) is not None and tier in one.into and self._is_kept(one)

    def _is_kept(self, one: _Computed) -> bool:
        """Part of an extent only if its request has ended: one that is preempted returns to its whole extents."""
        request, generations = one.request, self._pool.generations
        may_be = len(one.blocks) == self._extent_blocks or request.status is Status.FINISHED
        is_sound = request.num_tokens > request.num_given_tokens
        return may_be and is_sound and [generations[block] for block in one.blocks] == one.generations

    def _send(self) -> None:
        while self._computed and self._computed[0].step <= self._num_done:
            if self._is_kept(one := self._computed[0]):
                self._tiers.store(one.into, one.key, one.blocks, self._pool.generations)
            self._coming.pop(self._computed.popleft().key, None)  # it is queued now
