"""Limits on waiting sequences: in all, per priority class, per tenant.  Pure Python, no torch.

A sequence waits from its request's arrival until it runs, wherever it is kept meanwhile: in the queue, held
back by admission, or behind the sibling that computes its prompt.  So the waiting sequences are the live ones
that do not run, and only arrivals and ends are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inflight.config import EngineConfig
from inflight.engine.deltas import RequestFailed
from inflight.engine.events import EngineListener
from inflight.engine.policies.tenant_accounts import TenantAccounts
from inflight.engine.request import Request

__all__ = ["QueueLimits"]


class QueueLimits(EngineListener):
    """Counts the live sequences, and refuses requests that do not fit the queue.

    Attributes:
        num_live: sequences that have arrived and not ended.
        accounts: maps a tenant to its account.
        of_tenant: live sequences by account, if tenants are configured.
    """

    def __init__(self, config: EngineConfig, accounts: TenantAccounts) -> None:
        self.num_live = 0
        self._max_num_seqs = config.max_num_seqs
        self._max_queue_size = config.max_queue_size
        self._class_limits = {number: options.max_queue_size for number, options in config.priority_classes.items()}
        self._tenants = config.tenants
        self.accounts = accounts
        self._of_class: Counter[int] = Counter()
        self.of_tenant: Counter[str] = Counter()

    def arrived(self, sequences: Sequence[Request]) -> None:
        self._count(sequences, 1)

    def ended(self, request: Request) -> None:
        self._count([request], -1)

    def _count(self, sequences: Sequence[Request], change: int) -> None:
        self.num_live += change * len(sequences)
        for request in sequences:
            if request.priority in self._class_limits:
                self._of_class[request.priority] += change
            if self._tenants:
                account = self.accounts.of(request.tenant)
                self.of_tenant[account] += change
                if not self.of_tenant[account]:
                    del self.of_tenant[account]

    def refusal(self, sequences: Sequence[Request], running: Sequence[Request]) -> RequestFailed | None:
        """Why these sequences, all of one request, may not join the queue; None if they may.

        A request that can start immediately never counts against a limit.
        """
        for cap in (*self._tenant_caps(sequences[0], running), *self._caps(sequences[0], running)):
            failure = cap.refusal(sequences)
            if failure is not None:
                return failure
        return None

    def _caps(self, request: Request, running: Sequence[Request]) -> Iterator[_Cap]:
        """The limits of the priority class and of the whole queue."""
        slots = self._max_num_seqs
        room = slots - len(running)
        limit = self._class_limits.get(request.priority)
        if limit is not None:
            waiting = self._of_class[request.priority] - sum(r.priority == request.priority for r in running)
            option = f"priority_classes: max_queue_size={limit}"
            yield _Cap(f"the queue of priority class {request.priority}", option, limit, waiting, room, slots)
        if self._max_queue_size:
            waiting = self.num_live - len(running)
            option = f"max_queue_size={self._max_queue_size}"
            yield _Cap("the queue", option, self._max_queue_size, waiting, room, slots)

    def _tenant_caps(self, request: Request, running: Sequence[Request]) -> Iterator[_Cap]:
        account = self.accounts.of(request.tenant)
        options = self.accounts.options(account)
        if options.max_queued is None:
            return
        num_running = sum(self.accounts.of(r.tenant) == account for r in running)
        room, slots = self._max_num_seqs - len(running), self._max_num_seqs
        if options.max_running is not None:
            room, slots = min(room, options.max_running - num_running), min(slots, options.max_running)
        waiting, option = self.of_tenant[account] - num_running, f"tenants: max_queued={options.max_queued}"
        whose = "of all tenants without limits of their own" if account == "*" else f"of tenant {account!r}"
        yield _Cap(f"the queue {whose}", option, options.max_queued, waiting, room, slots)


@dataclass(frozen=True)
class _Cap:
    """A limit on waiting sequences, and the numbers that it is compared with.

    Attributes:
        queue: the limited queue, in words.
        option: the key that limits it, and its value.
        limit: sequences that may wait.
        waiting: sequences that wait now.
        room: sequences that could start immediately.
        slots: most sequences that can run at the same time.
    """

    queue: str
    option: str
    limit: int
    waiting: int
    room: int
    slots: int

    def refusal(self, sequences: Sequence[Request]) -> RequestFailed | None:
        request_id, n = sequences[0].request_id, len(sequences)
        if n > self.limit + self.slots:
            text = f"n={n} sequences never fit {self.queue} ({self.option}, and {self.slots} may run); lower n"
            return RequestFailed(request_id, "INVALID_ARG", text)
        if self.waiting + n - self.room <= self.limit:
            return None
        more = f", and the {n} of this request do not fit" if n > 1 else ""
        waiting = max(0, self.waiting - self.room)
        text = f"{self.queue} is full: {waiting} sequences are waiting{more} ({self.option}); try again later"
        return RequestFailed(request_id, "UNAVAILABLE", text)
