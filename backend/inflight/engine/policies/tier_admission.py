"""Requests start once their KV has come from a tier, where that is faster than computing it.  No torch.

    asked once            extents behind the cached prefix: which tier seems to have them?
    asked again           where another server has just begun the answer, whose KV may still be on its way: for half a
                          second; a peer is not, since it tells what is on its way
    while they come       `NotYet`, as long as the rest is expected in less than 0.8 of the time to compute it in its
                          turn, or they come faster; not longer than to compute all, but beside prompts before it
    in any other case     as if there were no tier: what has come is used, the rest is computed

In its turn: behind prompts that go before it.  A request that takes milliseconds to compute asks no tier.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial

from inflight.engine.events import DoneStep, EngineListener
from inflight.engine.kv_pool import KVPool
from inflight.engine.policies.base import AdmissionPolicy, LoadShares, NotYet, Rank
from inflight.engine.policies.cost_model import OnlineStepCost, step_load
from inflight.engine.request import Request
from inflight.engine.tiers.base import EngineTier
from inflight.engine.tiers.loads import Loads
from inflight.engine.tiers.tiers import ExtentLoad

__all__ = ["LOOK_SECONDS", "TierAdmission"]

_WORTH = 0.8  # a load may take so much of the time to compute the same
_FEW_SECONDS = 0.003  # to compute: no tier is asked for less
_UNMEASURED_SECONDS = 1e-3  # to compute a token on a CPU, until a prompt of some length has been
_UNMEASURED_GPU_SECONDS = 2e-5  # the same on a GPU
_MEASURED_TOKENS = 64
LOOK_SECONDS = 0.001  # for which the engine waits for a tier that usually answers at once
_LONGEST_WAIT = 60.0
_MOST_WAITING = 64  # requests; `HeldRequests` takes 256 of all kinds
_OTHER_WAIT_SECONDS = 15.0  # before a request fails that was held for something else, it starts
_AGAIN, _MOST_AGAIN = 0.1, 0.5  # of the time to compute, and seconds, in which the rest of an answer asks again
_JUST_BEGUN = 16  # tokens: an engine stores a prompt's KV with the first one
_AGAIN_EVERY = 0.02  # seconds after the first answer; twice as many after each further one
_EVERY = 8  # of the steps without prompts are learned from


@dataclass(slots=True, eq=False)
class _Visit:
    """A waiting request's one look at the tiers.

    Attributes:
        num_blocks: full blocks that the request has, but for one with its last token.
        stop: blocks before this one are in `places` or cached.
        until: when computing in its turn would have ended, as it is measured now; it ends no later than `latest`.
        ahead, total: tokens that went before its own when it began, and those of all prompts until then.
        order: the tiers that are still to be asked.
        asked: the one that is asked, `stop` at that time, and its answer.
        has_asked: any in this look; `has_looked`: the first look is over.
        again: until then those that others write are asked anew for extents that none had.
        next_look: when they are; `pause`: seconds before it.
        places, loads: first block of an extent -> the tier that seems to have it, and its load.
        begun: extents before this block are cached, or have loads.
        num_lost: loads that had yielded nothing when all of its own were looked at.
        num_found, num_cached: blocks of its prefix that were cached when it began, and when it was last asked.
        gained: until then it has lost nothing: computing the extents that have come would have taken so long, and so
            would the last of them.
    """

    num_blocks: int
    num_found: int
    num_cached: int
    stop: int
    began: float
    latest: float
    ahead: int
    total: int
    order: Iterator[EngineTier]
    until: float = 0.0
    asked: tuple[EngineTier, int, Future[tuple[int, int | None]]] | None = None
    has_asked: bool = False
    has_looked: bool = False
    again: float = 0.0
    next_look: float = 0.0
    pause: float = _AGAIN_EVERY
    places: dict[int, EngineTier] = field(default_factory=dict)
    loads: dict[int, ExtentLoad] = field(default_factory=dict)
    begun: int = 0
    num_lost: int = 0
    gained: float = 0.0
    is_over: bool = False


class TierAdmission(EngineListener):
    """Implements `AdmissionPolicy`: `inner`, whose requests that may start wait for their KV, if that pays.

    Args:
        step_tokens: maximum of a step.
        short: maximum tokens of a prompt that starts before longer ones.
        one_at_a_time: whether a step computes a further prompt only once those before it end.
    """

    def __init__(
        self,
        inner: AdmissionPolicy,
        loads: Loads,
        rank: Rank,
        shares: LoadShares | None,
        step_tokens: int,
        short: int,
        one_at_a_time: bool,
    ) -> None:
        self._inner, self._loads, self._tiers, self._rank = inner, loads, loads.tiers, rank
        self._most = step_tokens if one_at_a_time else math.inf
        self._short = short
        self._account = (lambda request: "") if shares is None else shares.account
        self._visits, self._cost = dict[Request, _Visit](), OnlineStepCost()
        self._num_steps = self._longest = 0  # longest: most tokens whose cost is known
        self._will_tell = False  # a first prompt is about to be computed: until it is, others wait
        self._total = 0  # tokens of all prompts so far
        self._running, self._begun = list[tuple[Request, int]](), list[tuple[Request, int]]()  # prompts and blocks left
        self._computed: dict[int, tuple[int, int]] = {}  # slot -> its last chunks, which followed each other: from, to

    def admits(
        self, request: Request, prefix: Sequence[int], running: Sequence[Request], pool: KVPool
    ) -> bool | NotYet:
        if (visit := self._visits.get(request)) is None or visit.is_over:
            answer = self._inner.admits(request, prefix, running, pool)
            if answer is not True or visit is not None:
                return answer
            visit = self._visits[request] = self._visit(request, prefix)
            if visit.is_over:
                return True
            self._loads.pool.follow(request)
        if self._is_coming(visit, request, prefix):
            return NotYet("its KV from a tier", 2 * _LONGEST_WAIT)  # `until` is sooner
        self._end(visit, request)
        answer = self._inner.admits(request, prefix, running, pool)  # loads that have begun took room
        self._begun.append((request, num_left := visit.num_blocks - len(prefix)))
        self._will_tell |= answer is True and self._longest < _MEASURED_TOKENS <= num_left * pool.block_size
        return answer

    def step_begins(self, running: Sequence[Request]) -> None:
        lefts = ((one, one.num_tokens - one.num_computed_tokens) for one in running)
        self._running = [(one, -(-left // self._loads.pool.block_size)) for one, left in lefts if left > 1]
        self._begun = []

    def step_done(self, step: DoneStep) -> None:
        out = step.out
        self._num_steps, self._total = self._num_steps + 1, self._total + out.num_prompt_tokens
        self._will_tell &= not out.num_prompt_tokens
        if (out.num_prompt_tokens or self._num_steps % _EVERY == 0) and not (out.swap_out or out.swap_in):
            self._cost.observe(step_load(out), step.result.ended - step.result.started)
            for row, (slot, done, num) in enumerate(zip(out.slots, out.num_computed_tokens, out.num_scheduled_tokens)):
                if num > 1 and row not in out.draft_token_ids:
                    start, end = self._computed.get(slot, (0, 0))
                    start, end = self._computed[slot] = start if end == done else done, done + num
                    if end - start >= max(_MEASURED_TOKENS, start // 4):  # few behind many found ones tell too little
                        self._longest = max(self._longest, min(end, 2 * (end - start)))

    def ended(self, request: Request) -> None:
        visit, self._will_tell = self._visits.pop(request, None), False
        if visit is not None and not visit.is_over:
            self._end(visit, request)

    left = ended  # if it was preempted, it looks again

    def _end(self, visit: _Visit, request: Request) -> None:
        visit.is_over = True
        self._loads.pool.unfollow(request)
        if visit.asked is not None:
            visit.asked[2].cancel()
        for load in visit.loads.values():
            self._loads.leave(load)

    def _visit(self, request: Request, prefix: Sequence[int]) -> _Visit:
        pool, size, tiers = self._loads.pool, self._tiers.extent_blocks, list(self._tiers.tiers)
        num_blocks, found, now = (request.num_tokens - 1) // pool.block_size, len(prefix), self._loads.clock()
        held_until = math.inf if request.held_until is None else request.held_until
        latest = min(now + _LONGEST_WAIT, held_until - _OTHER_WAIT_SECONDS)
        others = [(one, its.num_blocks - its.num_cached) for one, its in self._visits.items() if not its.is_over]
        ahead = self._ahead_of(request, num_blocks - found, [*self._begun, *others])
        visit = _Visit(num_blocks, found, found, found, now, latest, ahead, self._total, iter(tiers + tiers[:-1]))
        visit.is_over = (
            self._compute_seconds(len(prefix), num_blocks) < _FEW_SECONDS
            or not request.caches_blocks
            or (request.params.prompt_logprobs is not None and request.num_prompt_logprobs < request.num_prompt_tokens)
            or len(others) >= _MOST_WAITING
            or pool.most_reserved < size
            or not any(tier.is_open for tier in tiers)
            or latest <= now
        )
        if not visit.is_over:
            pool.hashes(request, num_blocks)
            self._tiers.num_queries += (num_blocks - len(prefix)) * pool.block_size
        return visit

    def _is_coming(self, visit: _Visit, request: Request, prefix: Sequence[int]) -> bool:
        """Whether to wait; starts what can be started."""
        size, now = self._tiers.extent_blocks, self._loads.clock()
        first = len(prefix) // size * size
        ahead = self._ahead_of(request, visit.num_blocks - visit.num_found, self._begun)
        visit.ahead = max(visit.ahead, 0 if visit.has_looked else self._total - visit.total)
        in_turn = self._compute_seconds(visit.num_found, visit.num_blocks, visit.ahead)
        visit.until = min(visit.began + in_turn, visit.latest)
        if now >= visit.until and (ahead <= self._most or now >= visit.latest):
            return False  # but not while it could not be computed yet: it starts before others begin
        if not visit.has_looked and not self._has_looked(visit, request):
            return True
        is_asking = self._asks_again(visit, request, len(prefix))
        stop = visit.stop // size * size if is_asking else visit.stop  # what is a part now may be whole soon
        if stop <= len(prefix):
            return is_asking
        if (load := visit.loads.get(first)) is not None and load.is_adopted:  # it was evicted again, or was the last
            stop = first
        if load is None or visit.num_lost != self._loads.num_lost:
            visit.begun, visit.num_lost = first, self._loads.num_lost
        for start in range(max(first, visit.begun), stop, size):
            if (load := visit.loads.get(start)) is None:
                if (tier := visit.places.get(start)) is None:  # it was cached, and has been evicted
                    visit.stop, visit.again = start, now
                    break
                count = min(size, stop - start)
                if self._loads.pool.has(request.block_hashes, start, count):  # it came before the ones ahead of it
                    visit.begun = start + size
                    continue
                load = self._loads.start(tier, request.block_hashes, start, count, prefix)
                if load is None:
                    break
                if not visit.loads:  # or what was cached long ago is evicted first
                    self._loads.pool.touch(prefix)
                visit.loads[start] = load
            elif load.is_adopted is False:
                visit.stop, visit.again = start, now
                break
            visit.begun = start + size
        if (stop := min(stop, visit.stop)) <= len(prefix):
            return False
        wanted = range(max(first, visit.begun), stop, size)
        last_hash = request.block_hashes[min(wanted.start + size, stop) - 1]
        if len(prefix) > visit.num_cached:
            all_, last = (self._compute_seconds(start, len(prefix)) for start in (visit.num_found, visit.num_cached))
            visit.gained, visit.num_cached = min(visit.began + all_, now + last), len(prefix)
        # Extents that come faster than they are computed are waited for, against any estimate.
        worth = math.inf if now < visit.gained else _WORTH * self._compute_seconds(len(prefix), stop, ahead)
        tier = visit.places[first]
        return tier.is_open and self._loads.come_within(worth, tier, last_hash, len(wanted))

    def _has_looked(self, visit: _Visit, request: Request) -> bool:
        """The first look at all tiers; whether it is over."""
        visit.has_looked = self._has_answers(visit, request)
        is_rest = request.attached is not None and request.attached.resumed and not request.num_preemptions
        is_rest = is_rest and request.num_given_tokens - request.num_prompt_tokens <= _JUST_BEGUN
        if visit.has_looked and is_rest and self._may_find_more(visit):
            now, seconds = self._loads.clock(), self._compute_seconds(visit.stop, visit.num_blocks)
            visit.again, visit.next_look = now + min(_AGAIN * seconds, _MOST_AGAIN), now + visit.pause
        return visit.has_looked

    def _may_find_more(self, visit: _Visit) -> bool:
        is_whole = visit.num_blocks - visit.stop >= self._tiers.extent_blocks
        return is_whole and any(tier.is_shared and tier.is_open for tier in self._tiers.tiers)

    def _asks_again(self, visit: _Visit, request: Request, num_cached: int) -> bool:
        """Whether the tiers may get more of what another server has computed; they are asked when it is time."""
        now = self._loads.clock()
        if visit.next_look <= now < visit.again:
            if visit.asked is None:
                visit.stop, visit.has_asked = max(visit.stop, num_cached), False
                visit.order = iter([tier for tier in self._tiers.tiers if tier.is_shared])
            if self._has_answers(visit, request):
                visit.pause *= 2
                visit.next_look = now + visit.pause
                if not (visit.has_asked and self._may_find_more(visit)):
                    visit.again = now
        return now < visit.again

    def _has_answers(self, visit: _Visit, request: Request) -> bool:
        """Ask the tiers one by one which extents they have; whether all have answered."""
        size, key_of, hashes = self._tiers.extent_blocks, self._tiers.seal.key_of, request.block_hashes
        while visit.stop < visit.num_blocks:
            if visit.asked is None:
                if self._joins(visit, hashes):
                    continue
                if (tier := next(visit.order, None)) is None:
                    break
                if not (tier.is_open and tier.answers_within(_WORTH * (visit.until - self._loads.clock()))):
                    continue
                stops = range(visit.stop // size * size + size, visit.num_blocks + 1, size)
                behind = partial(self._keys_of_parts, visit.stop, visit.num_blocks, hashes)
                answer = tier.find([key_of(hashes[stop - 1]) for stop in stops], behind)
                visit.asked, visit.has_asked = (tier, visit.stop, answer), True
            tier, asked_stop, answer = visit.asked
            if tier.finds_at_once and not visit.has_looked:
                wait([answer], LOOK_SECONDS)
            if not answer.done() and tier.is_open:
                return False
            found, part = answer.result() if answer.done() else (0, None)
            begin = asked_stop // size * size
            ends = [begin + (index + 1) * size for index in range(found)]
            ends += [] if part is None else [self._parts(asked_stop, visit.num_blocks, found)[part]]
            visit.places.update({begin + index * size: tier for index in range(len(ends))})
            visit.stop = max([visit.stop, *ends])
            visit.asked = None
        return True

    def _joins(self, visit: _Visit, hashes: Sequence[bytes]) -> bool:
        """Whether the next extent is on its way for another request: then no tier is asked for it."""
        size, loads = self._tiers.extent_blocks, self._tiers.loads
        begin = visit.stop // size * size
        ends = [begin + size] if begin + size <= visit.num_blocks else self._parts(visit.stop, visit.num_blocks, 0)
        for end in ends:
            if (load := loads.get(hashes[end - 1])) is not None and load.tier.is_open:
                visit.places[begin], visit.stop = load.tier, end
                return True
        return False

    def _keys_of_parts(self, stop: int, num_blocks: int, hashes: Sequence[bytes], found: int) -> list[bytes]:
        """Keys of the extents that end at `_parts`; called in a tier's thread."""
        return [self._tiers.seal.key_of(hashes[end - 1]) for end in self._parts(stop, num_blocks, found)]

    def _parts(self, stop: int, num_blocks: int, found: int) -> range:
        """Where the extent behind `found` whole ones, from `stop` on, can end before it is whole, the longest first."""
        size = self._tiers.extent_blocks
        start = (stop // size + found) * size
        too_short = max(start + self._tiers.part_blocks - 1, stop)
        return range(min(start + size - 1, num_blocks), too_short, -1)

    def _ahead_of(self, request: Request, own: int, waiting: Iterable[tuple[Request, int]]) -> int:
        """Tokens of running and `waiting` prompts (with blocks left) that come before a request's `own` blocks."""
        if request.num_preemptions:
            return 0
        most = own if request.num_tokens <= self._short else math.inf
        yielding = {*self._rank.outranked(request, [one for one, _ in self._running])}
        lefts = [left for one, left in self._running if left <= most and one not in yielding]
        for one, left in waiting:
            if left <= most and self._account(one) == self._account(request):
                lefts.append(0 if self._rank.goes_before(request, one) else left)
        return self._loads.pool.block_size * sum(lefts)

    def _compute_seconds(self, num_cached: int, num_blocks: int, ahead: int = 0) -> float:
        """Seconds to compute the blocks of a request behind its first `num_cached`, and before them other tokens."""
        start, stop = (number * self._loads.pool.block_size for number in (num_cached, num_blocks))
        num = stop - start + ahead
        if self._longest < _MEASURED_TOKENS:
            guess = _UNMEASURED_SECONDS if self._tiers.on_cores else _UNMEASURED_GPU_SECONDS
            return num * (_LONGEST_WAIT if self._will_tell else guess)
        if stop > self._longest:  # short prompts do not tell what attention costs in long ones
            start, stop = 0, self._longest
        return self._cost.cost.recompute_seconds(start, stop) * num / max(1, stop - start)
