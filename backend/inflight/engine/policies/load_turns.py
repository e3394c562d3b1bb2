"""Which tenant's adapter is loaded next, and what its load costs the tenant.  Pure Python, no torch.

One thread loads all adapters, and memory has few places for them.  So loads are part of fair shares (`FairQueue`):

    turn       a load begins if no other tenant goes before the request that causes it, neither one with a request
               that may start nor one that waits for a load, too.  A tenant that is not next loads one adapter ahead:
               the next one only once a request of its has started.  At most two are in the loader, one of them running
    cost       the tokens that the engine computes in the time that the load takes, by both measured times.  An estimate
               (the mean of the last loads) is charged when it begins, and corrected when it ends
    payer      the account of the request that causes the load; requests that find the adapter loaded pay nothing
    eviction   of the adapters that were asked for within a minute, one whose account has the most leaves first, and
               what the operator has loaded leaves last.  An account with adapters in memory takes a place of its
               own, or of one that has more; another one only after the patience of `AdapterTable`.  Its next
               request does not take the place of an adapter that was loaded for one that only lacks a slot or blocks:
               the tenant would pay for both, and start with neither

So a tenant that names adapters without end spends its own share on them, in memory, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from inflight.engine.events import DoneStep, EngineListener
from inflight.engine.policies.base import LoadShares
from inflight.engine.request import Request

__all__ = ["LoadTurns"]

_MOST_LOADING = 2  # the loader goes on with the second one while the engine makes a step
_STEPS = 100  # after which the pace of a step weighs 1/e
_LOADS = 8  # the same of loads
_MAX_AHEAD = 1024  # tenants that are remembered


class _Load(NamedTuple):
    """A load that has begun.

    Attributes:
        request: stands for the tenant that pays.
        tokens: that were charged.
    """

    request: Request
    tokens: float
    loaded: Future[dict[str, Any]]


class LoadTurns(EngineListener):
    """Grants loads one by one, and charges them.

    Attributes:
        tokens_per_second: that the engine computes, of the last steps.
    """

    def __init__(self, shares: LoadShares) -> None:
        self._shares = shares
        self._loading: list[_Load] = []
        # For their turn: the number of the step in which each asked last.  In the order in which they asked first.
        self._waiting: dict[Request, int] = {}
        self._step = 0
        self._next: Request | None = None  # of `_waiting`
        self._ahead: dict[str, None] = {}  # accounts that have loaded one ahead
        # Id of an adapter in memory -> account; None: no request has caused its load, so the operator has.
        self._payers: dict[str, str | None] = {}
        self._unused: dict[str, tuple[Request, bool]] = {}  # id of an adapter -> whom it was loaded for; see `waits`
        self._tokens = self._seconds = 0.0  # of the last steps
        self._load_seconds = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0

    def may_begin(self, request: Request) -> bool:
        """Whether its adapter may be loaded now; else, once its tenant's turn comes, and it asks again."""
        if request is self._next:
            return True
        return not self._waiting and len(self._loading) < _MOST_LOADING and self._may_be_next(request)

    def _may_be_next(self, request: Request) -> bool:
        return self._shares.is_next(request) or self._shares.account(request) not in self._ahead

    def wait(self, request: Request) -> None:
        """It waits while it asks in each step, until it has begun or is forgotten.

        Others may begin before one that does not ask: one that is neither held nor reached, or past its deadline.
        """
        self._waiting[request] = self._step

    def forget(self, request: Request) -> None:
        """It waits no longer: its adapter is loaded, or on its way, or it has ended."""
        self._waiting.pop(request, None)
        if request is self._next:
            self._next = None

    def began(self, request: Request, adapter_id: str, loaded: Future[dict[str, Any]]) -> None:
        """Its load has begun."""
        self.forget(request)
        account, tokens = self._shares.account(request), self._load_seconds * self.tokens_per_second
        if not self._shares.is_next(request):
            self._ahead[account] = None
            if len(self._ahead) > _MAX_AHEAD:
                del self._ahead[next(iter(self._ahead))]
        self._shares.charge(request, tokens)
        self._payers[adapter_id] = account
        self._unused[adapter_id] = request, False
        self._loading.append(_Load(request, tokens, loaded))

    def used(self, adapter_id: str) -> None:
        """A request begins with it, or none wants it any more."""
        self._unused.pop(adapter_id, None)

    def waits(self, adapter_id: str, request: Request, for_more: bool) -> None:
        """Whether a request that has not begun, and whose adapter is loaded, waits for a grammar or the like, too."""
        if adapter_id in self._unused and self._unused[adapter_id][0] is request:
            self._unused[adapter_id] = request, for_more

    def leaving(self, adapter_ids: Sequence[str], request: Request | None, impatient: bool) -> list[str]:
        """See `Adapters.reset`."""
        self._payers = {key: self._payers.get(key) for key in adapter_ids}
        counts = Counter(self._payers.values())
        counts[None] = 0
        order = sorted(adapter_ids, key=lambda key: -counts[self._payers[key]])
        if request is None:
            return order
        own = self._shares.account(request)
        order = [key for key in order if self._payers[key] != own or not self._is_owed(key, request)]
        if impatient or not counts[own]:
            return order
        return [key for key in order if self._payers[key] == own or counts[self._payers[key]] > counts[own]]

    def _is_owed(self, adapter_id: str, request: Request) -> bool:
        """Whether `request`, of the same account, must leave it to the one that has paid for it."""
        first, waits_for_more = self._unused.get(adapter_id, (request, True))
        return not (waits_for_more or first.finish_reason or self._shares.goes_before(request, first))

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        self._ahead.pop(self._shares.account(request), None)

    def step_begins(self, running: Sequence[Request]) -> None:
        for load in [load for load in self._loading if load.loaded.done()]:
            self._loading.remove(load)
            if load.loaded.exception() is None:  # one that fails costs what was estimated
                seconds = load.loaded.result()["seconds"]
                self._load_seconds += (seconds - self._load_seconds) / (_LOADS if self._load_seconds else 1)
                self._shares.charge(load.request, seconds * self.tokens_per_second - load.tokens)
        self._waiting = {request: asked for request, asked in self._waiting.items() if asked == self._step}
        self._step += 1
        self._next = None
        if self._waiting and len(self._loading) < _MOST_LOADING:
            for request in filter(self._may_be_next, self._waiting):
                if self._next is None or self._shares.goes_before(request, self._next):
                    self._next = request

    def step_done(self, step: DoneStep) -> None:
        keep = 1.0 - 1.0 / _STEPS
        self._tokens = self._tokens * keep + step.out.num_tokens
        self._seconds = self._seconds * keep + step.end - step.start
