"""Weighted fair queueing across tenants, by tokens served, with caps.  Pure Python, no torch.

A tenant here is an account (`engine/policies/tenant_accounts.py`): names that clients can make up share one account.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with the token as the unit of service, as in
the virtual token counter of Sheng et al. (OSDI 2024, arXiv:2401.00588).  Each tenant has a tag:

    tag = (tokens computed for it + tokens that its running requests can still take + its loads) / weight

and of the tenants in line (a request waits, and the cap on running sequences leaves room) the one with the
smallest tag is next.  Admission adds a request's largest possible cost to the tag; when the request leaves,
its unused part is subtracted again.  So the tag ends up exact for any `max_tokens` that a client declares,
and steps need no counting.  `charge` adds what a tenant causes beside the steps: the load of an adapter, as many
tokens as the engine computes in that time (`load_turns.py`).

    virtual time    the largest tag at which a request was admitted, or a load charged, so far; a load does not move it
                    past the tenant that is next, since loads also begin out of turn
    joining         a tenant that was not in line starts at the virtual time or at its tag, whichever
                    is later: idling earns no credit, and no debt is forgiven

Two tenants that stay in line from t1 to t2 are served W_a and W_b tokens in that time.  With L the
largest cost of a request (its prompt and `max_tokens`) and S = `max_num_seqs`,

    W_a / w_a - W_b / w_b  <=  L * ((1 + 2 * S) / w_a + (1 + S) / w_b)

since running requests keep their slots: a tenant that was alone can hold all S slots when the
other arrives.  (At a's last admission its tag was at most b's, so a's service exceeds b's by at
most the tokens that b's running requests can still take, S * L / w_b, and one request of a; the
other terms bound the difference at t1.)  With loads, W contains them, and L is at least the largest one.

A request that admission holds back is out of the queue, in one of a few places for all tenants (`HeldRequests`).  A
tenant that holds more of them than are free is not in line until one of its own returns or ends: so k tenants that
only cause waits hold k / (k + 1) of them, and others always find one (Choudhury and Hahne, Dynamic Queue Length
Thresholds, IEEE/ACM Transactions on Networking 1998).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heapreplace

from inflight.config import TenantOptions
from inflight.engine.events import EngineListener
from inflight.engine.policies.base import MAX_HELD
from inflight.engine.policies.due_order import DueOrder
from inflight.engine.policies.tenant_accounts import TenantAccounts
from inflight.engine.request import Request

__all__ = ["FairQueue"]

_MAX_IDLE = 1024  # tenants remembered without a request; a forgotten one starts at the virtual time

_Entry = tuple[float, int, int, "_Tenant"]  # tag, number of its last admission, number of the tenant


@dataclass(slots=True, eq=False)
class _Tenant:
    """A tenant's waiting and running requests.

    Attributes:
        number: unique, so that comparisons of entries never reach the tenant itself.
        tag: virtual time at which it is next; tokens per weight.
        last_admission: number of its last admission among those of all tenants; of equal tags the lowest is next.
        running: in the order of `queue`'s `position`.
        held: taken out of the queue, and neither admitted nor ended.
        entry: its place in the line, or None while it is not in line.
    """

    name: str
    options: TenantOptions
    number: int
    queue: DueOrder
    tag: float = 0.0
    last_admission: int = 0
    running: list[Request] = field(default_factory=list)
    held: set[Request] = field(default_factory=set)
    entry: _Entry | None = None

    @property
    def startable(self) -> int:
        """Waiting requests that may run now, under its cap."""
        cap = self.options.max_running
        return len(self.queue) if cap is None else min(len(self.queue), cap - len(self.running))

    def cost(self, request: Request) -> float:
        """Tokens that the request can still take, in units of the tag."""
        return (request.max_total_tokens - request.num_computed_tokens) / self.options.weight


class FairQueue(EngineListener):
    """A queue for each tenant, served by weight; inside a tenant `DueOrder` decides.

    Priority classes act within a tenant: a request outranks running requests of its tenant only.

    Args:
        make_queue: an empty queue for one more tenant.
        accounts: maps a request to its account, and an account to its options.
    """

    def __init__(self, make_queue: Callable[[], DueOrder], accounts: TenantAccounts) -> None:
        self._make_queue = make_queue
        self._accounts = accounts
        self._tenants: dict[str, _Tenant] = {}
        self._idle: dict[str, None] = {}  # least recently busy first
        self._line: list[_Entry] = []  # sorted
        self._virtual_time = 0.0
        self._crowded: set[_Tenant] = set()  # with requests that wait, but too many held
        self._num_waiting = self._num_admitted = self._num_tenants = self._num_held = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        for tenant in self._tenants.values():
            yield from tenant.queue

    def __contains__(self, request: object) -> bool:
        tenant = self._tenants.get(self._accounts.of(request.tenant)) if isinstance(request, Request) else None
        return tenant is not None and request in tenant.queue

    def add(self, request: Request) -> None:
        tenant = self._tenant(request)
        self._idle.pop(tenant.name, None)
        self._no_longer_held(request, tenant)
        tenant.queue.add(request)
        self._num_waiting += 1
        if tenant.entry is None:
            self._line_up(tenant)

    def add_first(self, request: Request) -> None:
        self.add(request)

    def next_requests(self, limit: int) -> list[Request]:
        """In the order in which they would be admitted one by one; prefix hits are not known yet."""
        heap = [(*entry, 0) for entry in self._line[:limit]]  # sorted, hence a heap
        found: list[Request] = []
        while heap and len(found) < limit:
            tag, _, number, tenant, taken = heap[0]
            request = tenant.queue[taken]
            found.append(request)
            if taken + 1 < min(tenant.startable, self._holdable(tenant)):
                heapreplace(
                    heap, (tag + tenant.cost(request), self._num_admitted + len(found), number, tenant, taken + 1)
                )
            else:
                heappop(heap)
        return found

    def remove(self, request: Request) -> None:
        tenant = self._tenant(request)
        tenant.queue.remove(request)
        self._num_waiting -= 1
        tenant.held.add(request)  # unless it is admitted or ends
        self._num_held += 1
        if not tenant.queue or self._holdable(tenant) <= 0:
            self._line_up(tenant)

    def ahead(self, request: Request) -> list[Request]:
        """Its tenant's requests that are due before it; other tenants' requests with their turn at a smaller tag."""
        tenant = self._tenant(request)
        found = tenant.queue.ahead(request)
        tag = self._tag(tenant) + sum(map(tenant.cost, found))
        for other_tag, _, _, other in self._line:
            if other is tenant or other_tag > tag:
                continue
            for index in range(other.startable):
                if other_tag > tag:
                    break
                found.append(other.queue[index])
                other_tag += other.cost(found[-1])
        return found

    def goes_before(self, request: Request, other: Request) -> bool:
        """By their tenants' tags; within a tenant by its queue."""
        mine, theirs = self._tenant(request), self._tenant(other)
        if mine is theirs:
            return mine.queue.goes_before(request, other)
        cap = mine.options.max_running
        return (cap is None or len(mine.running) < cap) and self._tag(mine) < self._tag(theirs)

    def position(self, request: Request, running: Sequence[Request]) -> int:
        """In order of admission, but before requests of its tenant that are due later."""
        tenant = self._tenant(request)
        due = tenant.queue.due(request)
        if not tenant.running or tenant.queue.due(tenant.running[-1]) <= due:
            return len(running)
        theirs = (i for i, other in enumerate(running) if self._accounts.of(other.tenant) == tenant.name)
        return next((i for i in theirs if tenant.queue.due(running[i]) > due), len(running))

    def outranked(self, request: Request, running: Sequence[Request]) -> Iterator[Request]:
        tenant = self._tenant(request)
        return tenant.queue.outranked(request, tenant.running)

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        tenant = self._tenant(request)
        self._idle.pop(tenant.name, None)
        self._no_longer_held(request, tenant)
        self._num_admitted += 1
        self._virtual_time = max(self._virtual_time, tenant.tag)
        tenant.tag += tenant.cost(request)
        tenant.last_admission = self._num_admitted
        tenant.running.insert(tenant.queue.position(request, tenant.running), request)
        self._line_up(tenant)

    def left(self, request: Request) -> None:
        tenant = self._tenant(request)
        tenant.tag -= tenant.cost(request)
        tenant.running.remove(request)
        self._line_up(tenant)

    def ended(self, request: Request) -> None:
        tenant = self._tenants.get(self._accounts.of(request.tenant))
        if tenant is not None and request in tenant.held:
            self._no_longer_held(request, tenant)
            self._line_up(tenant)

    def account(self, request: Request) -> str:
        return self._accounts.of(request.tenant)

    def is_next(self, request: Request) -> bool:
        return not self._line or self._tag(self._tenant(request)) <= self._line[0][0]

    def charge(self, request: Request, tokens: float) -> None:
        tenant = self._tenant(request)
        if tokens > 0:  # service begins, as with an admission
            tenant.tag = self._tag(tenant)
            started = min(tenant.tag, self._line[0][0]) if self._line else tenant.tag
            self._virtual_time = max(self._virtual_time, started)
        tenant.tag += tokens / tenant.options.weight
        self._line_up(tenant)

    def _holdable(self, tenant: _Tenant) -> int:
        """How many more of its requests may be held, so that it then holds at most one more than are free."""
        return (MAX_HELD - self._num_held - len(tenant.held)) // 2 + 1

    def _no_longer_held(self, request: Request, tenant: _Tenant) -> None:
        if request in tenant.held:
            tenant.held.remove(request)
            self._num_held -= 1
            for other in [*self._crowded]:
                self._line_up(other)

    def _tenant(self, request: Request) -> _Tenant:
        name = self._accounts.of(request.tenant)
        tenant = self._tenants.get(name)
        if tenant is None:
            self._num_tenants += 1
            tenant = _Tenant(name, self._accounts.options(name), self._num_tenants, self._make_queue())
            self._tenants[name] = tenant
            self._idle[name] = None
        return tenant

    def _tag(self, tenant: _Tenant) -> float:
        """Its tag; for one that is not in line, the tag at which it would join now."""
        return tenant.tag if tenant.entry is not None else max(tenant.tag, self._virtual_time)

    def _line_up(self, tenant: _Tenant) -> None:
        """Put the tenant at its tag's place in the line, or take it out of the line."""
        joins = tenant.entry is None
        if tenant.entry is not None:
            del self._line[bisect_left(self._line, tenant.entry)]
            tenant.entry = None
        self._crowded.discard(tenant)
        if tenant.startable > 0 and tenant.held and self._holdable(tenant) <= 0:
            self._crowded.add(tenant)
        elif tenant.startable > 0:
            if joins:
                tenant.tag = max(tenant.tag, self._virtual_time)
            tenant.entry = (tenant.tag, tenant.last_admission, tenant.number, tenant)
            insort(self._line, tenant.entry)
        elif not tenant.queue and not tenant.running and not tenant.held:
            self._idle[tenant.name] = None
            if len(self._idle) > _MAX_IDLE:
                name = next(iter(self._idle))
                del self._idle[name], self._tenants[name]
