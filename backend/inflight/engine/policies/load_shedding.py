"""Refuses requests that would miss their deadline by waiting, on arrival, before any work is spent on them.

An overloaded engine that accepts every request serves none in time: each waits until its deadline is near, and the
work for requests that miss it is lost.  So the arrival is placed in a forecast of the slots:

    slots      busy ones until the expected end of their requests, and the free ones
    queue      the requests ahead of it (`OrderPolicy.ahead`): each takes the slot that is free first
    arrival    starts at its turn, and takes its own expected time

It is refused if it has to wait and would end after its deadline.  A request that can start immediately is never
refused, nor is any before `_WARM_UP` steps were observed: there is no basis for a prediction.

`_Pace` measures the time of a step without prompts and of a prompt token, separately, since waiting prompts add to
the decodes; and the tokens of a step, since drafts can yield several per sequence.  Expected outputs are the lengths
of the last requests that ended (`OutputLengths`).  Pure Python, no torch.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from inflight.config import EngineConfig
from inflight.engine.deltas import RequestFailed
from inflight.engine.events import DoneStep, EngineListener
from inflight.engine.kv_pool import KVPool
from inflight.engine.policies.base import OrderPolicy
from inflight.engine.policies.deadline_admission import AdmissionRecord
from inflight.engine.policies.tenant_accounts import TenantAccounts
from inflight.engine.request import FinishReason, Request, Status

__all__ = ["LoadShedding"]

_WARM_UP = 20  # steps before the first prediction
_WARM_UP_ENDED = 8  # ended requests, likewise
_MEMORY = 100  # steps after which an observation weighs 1/e
_LATE_SHARE = 0.1  # share of the requests accepted to wait that end late
_GAIN = 0.005  # small: the outcome of a request is known seconds later, with hundreds in progress
_LEAST, _MOST = 0.9, 5.0
_MAX_OUTPUT = 2**31
_MAX_AHEAD = 2048  # requests placed one by one; the others count as their mean


class SchedulerState(Protocol):
    """The part of the scheduler that predictions read."""

    running: list[Request]
    waiting: OrderPolicy
    pool: KVPool

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, and requests that are held back."""


class _Pace:
    """The time of steps: seconds = base + per_prompt_token * prompt tokens; recent steps weigh more.

    Attributes:
        num_steps: steps observed so far.
        mean: seconds of a step, prompts included.
        gain: tokens that a sequence gets in a step.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.mean = 0.0
        self.gain = 1.0
        self._tokens = self._product = self._square = 0.0

    def observe(self, prompt_tokens: int, seconds: float, gain: float = 1.0) -> None:
        self.num_steps += 1
        share = max(1.0 / self.num_steps, 1.0 / _MEMORY)
        self.mean += share * (seconds - self.mean)
        self.gain += share * (gain - self.gain)
        self._tokens += share * (prompt_tokens - self._tokens)
        self._product += share * (prompt_tokens * seconds - self._product)
        self._square += share * (prompt_tokens * prompt_tokens - self._square)

    @property
    def per_prompt_token(self) -> float:
        """Seconds that a prompt token adds to a step: the slope of the regression line."""
        variance = self._square - self._tokens * self._tokens
        if variance <= 1e-9 * max(1.0, self._square):
            return 0.0
        slope = (self._product - self._tokens * self.mean) / variance
        return max(0.0, min(slope, self.mean / max(1.0, self._tokens)))

    @property
    def per_token(self) -> float:
        """Seconds per token of a sequence, including prompts of other requests."""
        return self.mean / self.gain

    @property
    def per_token_alone(self) -> float:
        """Seconds per token of a sequence in steps without prompts."""
        return (self.mean - self.per_prompt_token * self._tokens) / self.gain


class _Caution:
    """The factor that stretches predictions, so that about a tenth of the requests that waited end late.

    It is learned from their outcomes: others pass them in line, outputs are longer than the requests that ended in
    time suggest, the machine slows down.  With a tenth late, about as many requests are accepted as can be served.

    Attributes:
        factor: of the predicted time, 1 at first.
    """

    def __init__(self) -> None:
        self.factor = 1.0

    def observe(self, late: bool) -> None:
        """A request that was accepted to wait ended: `late`, or in time."""
        factor = self.factor * (1.0 + _GAIN * (1.0 - _LATE_SHARE) if late else 1.0 - _GAIN * _LATE_SHARE)
        self.factor = min(max(factor, _LEAST), _MOST)


class LoadShedding(EngineListener):
    """Implements `ArrivalPolicy` by a prediction.

    Args:
        accounts: the units of the tenants' limits.
        record: admission's findings.
        clock: seconds, on the clock of the deadlines.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: SchedulerState,
        accounts: TenantAccounts,
        record: AdmissionRecord,
        clock: Callable[[], float],
    ) -> None:
        self._is_on = config.shed_on_predicted_wait
        self._scheduler = scheduler
        self._max_num_seqs = config.max_num_seqs
        self._clock = clock
        self._accounts = accounts
        self._pace = _Pace()
        self._record = record
        self._lengths = record.lengths
        self._slots = config.max_num_seqs  # that requests can hold at a time: fewer if blocks are scarce
        self._caution = _Caution()
        self._foretold: OrderedDict[Request, float] = OrderedDict()  # deadlines of requests accepted to wait
        self._last = 0.0  # when the last step ended
        self._computed = 1.0  # share of prompt tokens that the prefix cache does not have
        self._queries = self._hits = 0

    # -- events -----------------------------------------------------------------------------

    def step_done(self, step: DoneStep) -> None:
        scheduler, pool = self._scheduler, self._scheduler.pool
        self._pace.observe(step.out.num_prompt_tokens, step.end - max(step.start, self._last), _tokens_of_a_row(step))
        self._last = step.end
        running = len(scheduler.running)
        if not scheduler.num_waiting:
            self._slots = self._max_num_seqs
        elif self._record.blocked:
            self._slots = max(1, running)
        else:
            self._slots = max(self._slots, running)
        if pool.num_prefix_queries > self._queries:
            hits, queries = pool.num_prefix_hits - self._hits, pool.num_prefix_queries - self._queries
            self._hits, self._queries = pool.num_prefix_hits, pool.num_prefix_queries
            self._computed += 0.1 * (1.0 - hits / queries - self._computed)

    def ended(self, request: Request) -> None:
        if not request.num_output_tokens and request.finish_reason is FinishReason.ABORT:
            return  # it never ran: `_forget_late`
        deadline = self._foretold.pop(request, None)
        if deadline is not None:
            self._caution.observe(self._clock() >= deadline)

    def _forget_late(self) -> None:
        """Forget late and ended requests that never ran; called on an arrival."""
        now = self._clock()
        while self._foretold:
            request, deadline = next(iter(self._foretold.items()))
            if request.status is Status.RUNNING or (request.status is Status.WAITING and deadline > now):
                return
            del self._foretold[request]
            if deadline <= now:
                self._caution.observe(True)

    # -- predictions -----------------------------------------------------------------------

    def refusal(self, sequences: Sequence[Request], failure: RequestFailed | None) -> RequestFailed | None:
        """Why an arriving request's sequences are refused; None if they are accepted.

        Args:
            failure: why the queue refuses them; the answer adds `retry_after`.
        """
        if failure is not None:
            return self._hinted(failure, len(sequences))
        first = sequences[0]
        if not self._is_on or first.deadline is None or not self._knows:
            return None
        if first.num_given_tokens > first.num_prompt_tokens:  # a resumed request: its output must not be lost
            return None
        wait, own = self._predict(sequences)
        if not wait:
            return None
        end, left = (wait + own) * self._caution.factor, first.deadline - self._clock()
        self._forget_late()
        if end <= left:
            self._foretold[first] = first.deadline
            return None
        text = (
            f"the queue is too long for the request's deadline: it would end in about {end:.1f} s, "
            f"and {max(0.0, left):.1f} s are left"
        )
        return RequestFailed(first.request_id, "UNAVAILABLE", text, retry_after=end - left, shed=True)

    @property
    def _knows(self) -> bool:
        return self._pace.num_steps >= _WARM_UP and self._lengths.num_seen >= _WARM_UP_ENDED

    def _predict(self, sequences: Sequence[Request]) -> tuple[float, float]:
        """Seconds until the last of the sequences starts, 0 if all can start immediately; and their own seconds."""
        scheduler, first = self._scheduler, sequences[0]
        ahead = _with_children(scheduler.running, scheduler.waiting.ahead(first))
        yielding = set(scheduler.waiting.outranked(first, scheduler.running))
        running = [request for request in scheduler.running if request not in yielding]
        wait, own = self._place(sequences, ahead, running, self._slots)
        of, account = self._accounts.of, self._accounts.of(first.tenant)
        cap = self._accounts.options(account).max_running
        if cap is not None and cap < self._slots:  # its account has fewer slots
            ahead, running = ([r for r in some if of(r.tenant) == account] for some in (ahead, running))
            wait = max(wait, self._place(sequences, ahead, running, cap)[0])
        return wait, own

    def _place(
        self, sequences: Sequence[Request], ahead: Sequence[Request], running: Sequence[Request], slots: int
    ) -> tuple[float, float]:
        """As `_predict`, on `slots` slots; the `running` requests hold some of them."""
        pace, now = self._pace, self._clock()
        own = sequences[0].num_tokens * self._computed * pace.per_prompt_token
        own += self._length(sequences[-1]) * pace.per_token
        if len(running) + len(ahead) + len(sequences) <= slots:
            return 0.0, own
        token = max(pace.per_token, 1e-9)

        def rest(request: Request, start: float) -> float:
            """Tokens until it ends, by itself or at its deadline, if it starts or continues `start` tokens from now."""
            left = max(1.0, request.num_prompt_tokens + self._lengths.likely(request) - request.num_tokens)
            if request.deadline is not None:
                left = min(left, max(0.0, (request.deadline - now) / token - start))
            return left

        free_at = [rest(request, 0.0) for request in running]
        free_at += [0.0] * (slots - len(free_at))
        heapq.heapify(free_at)
        prompt_tokens = 0
        for request in ahead[:_MAX_AHEAD]:
            taken = rest(request, free_at[0])
            prompt_tokens += request.num_tokens if taken else 0
            heapq.heapreplace(free_at, free_at[0] + taken)
        for request in sequences:
            start = heapq.heapreplace(free_at, free_at[0] + self._length(request))
        scale = max(1.0, len(ahead) / _MAX_AHEAD)
        return scale * (start * pace.per_token_alone + prompt_tokens * self._computed * pace.per_prompt_token), own

    def _length(self, request: Request) -> float:
        """Expected output tokens of the request: a mean, not a draw."""
        return self._lengths.mean(request.max_total_tokens - request.num_prompt_tokens)

    def _hinted(self, failure: RequestFailed, count: int) -> RequestFailed:
        """Add the time until `count` more sequences end, if known."""
        if not self._knows or failure.code != "UNAVAILABLE":
            return failure
        seconds = count * self._lengths.mean(_MAX_OUTPUT) / max(1, self._slots) * self._pace.per_token
        return msgspec.structs.replace(failure, retry_after=seconds)


def _tokens_of_a_row(step: DoneStep) -> float:
    """Mean tokens of the sequences that got any in a step; 1 if none did."""
    several = [len(delta.token_ids) for delta in step.deltas if delta.token_ids]
    rows = len(several) + len(step.tokens.token_ids)
    return (sum(several) + len(step.tokens.token_ids)) / rows if rows else 1.0


def _with_children(running: Sequence[Request], ahead: Sequence[Request]) -> list[Request]:
    """All sequences in line: children of running leaders come first, other children directly behind their leader."""
    found = [child for request in running for child in request.children]
    for request in ahead:
        found += [request, *request.children]
    return found
