"""The scheduler's choices: which request is next, gives way, starts, is in a step; how much at once, and what to draft.

`Scheduler.schedule()` asks these questions and nothing else; a new answer is a new class here or in a file
of its own, never a branch there.  `Policies` holds one answer to each; `selection.py` builds
the answers that `model.json` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from inflight.engine.deltas import RequestFailed, TierTotals
from inflight.engine.drafting.drafter import DraftCounts, Drafter
from inflight.engine.events import EngineListener
from inflight.engine.kv_pool import KVPool
from inflight.engine.request import Request

__all__ = [
    "MAX_HELD",
    "AdmissionPolicy",
    "ArrivalPolicy",
    "BudgetPolicy",
    "LoadShares",
    "NotYet",
    "OrderPolicy",
    "Policies",
    "Rank",
    "RequestQueue",
    "TurnPolicy",
    "UrgencyPolicy",
    "VictimPolicy",
]


class RequestQueue(Protocol):
    """Holds the waiting requests and chooses the next ones; called by the scheduler alone."""

    def __len__(self) -> int:
        """Number of waiting requests."""

    def __iter__(self) -> Iterator[Request]:
        """Waiting requests, in any order."""

    def __contains__(self, request: object) -> bool:
        """Whether the request waits here."""

    def add(self, request: Request) -> None:
        """Queue a request that just arrived."""

    def add_first(self, request: Request) -> None:
        """Queue a request that was already admitted once (preempted), or whose leader was."""

    def next_requests(self, limit: int) -> list[Request]:
        """Up to `limit` requests that may run now, in the order in which to admit them."""

    def remove(self, request: Request) -> None:
        """Take a request out: it is admitted or aborted."""


class Rank(Protocol):
    """Which of two requests goes first.  The relation has no cycles."""

    def ahead(self, request: Request) -> list[Request]:
        """Waiting requests that would be admitted before `request`, which is not queued, if no more arrived."""

    def goes_before(self, request: Request, other: Request) -> bool:
        """Whether `request` would be admitted before `other`; both wait, in the queue or out of it."""

    def position(self, request: Request, running: Sequence[Request]) -> int:
        """The request's place in `running`, where the first request gets the first tokens of a step."""

    def outranked(self, request: Request, running: Sequence[Request]) -> Iterator[Request]:
        """The running requests that give way to the waiting `request` if room is lacking, in this order.

        A request that gave way is next only after `request`.
        """


class OrderPolicy(RequestQueue, Rank, Protocol):
    """A queue and a rank over the same requests."""


class UrgencyPolicy(Protocol):
    """Which waiting requests start before the running ones get their tokens of a step, even in place of some."""

    def next_requests(self, running: Sequence[Request]) -> Iterator[Request]:
        """Waiting requests in the order in which to ask for them; lazily, since `running` changes on the way."""

    def grant(self, request: Request, missing: int, limit: int) -> int:
        """As of a `BudgetPolicy`, which it asks: with how many tokens such a request starts; 0 passes it over."""

    def giving_way(
        self,
        request: Request,
        prefix: Sequence[int],
        beside: Sequence[Request],
        running: Sequence[Request],
        pool: KVPool,
    ) -> Sequence[Request]:
        """The running requests to preempt until `request` has room; none if all that may give way are not enough.

        Args:
            prefix: the blocks that the prefix cache would give it.
            beside: the running requests that keep their blocks.
        """


# Chooses the request that gives up its blocks.  The candidates, in the running order, are not yet in this step.
VictimPolicy = Callable[[Sequence[Request]], Request]


MAX_HELD = 256  # requests for which the answer was "not yet"; then it means no


@dataclass(frozen=True)
class NotYet:
    """A request waits for something outside the engine: a grammar to compile, KV to arrive.

    Attributes:
        reason: the thing that it waits for, for its failure message.
        seconds: how long it may wait before it fails.
        failure: why it can never start, in words for the client (INVALID_ARG); "" if it may still start.
    """

    reason: str
    seconds: float
    failure: str = ""


class ArrivalPolicy(Protocol):
    """Whether the engine accepts a request at all."""

    def refusal(self, sequences: Sequence[Request], failure: RequestFailed | None) -> RequestFailed | None:
        """Why an arriving request's sequences are refused; None if they are accepted.

        Args:
            failure: why they are refused in any case; the answer can only add to it.
        """


class AdmissionPolicy(Protocol):
    """Whether a waiting request may start now."""

    def admits(
        self, request: Request, prefix: Sequence[int], running: Sequence[Request], pool: KVPool
    ) -> bool | NotYet:
        """Whether it may start beside `running`: all running requests, or the ones that will not give way to it.

        True; False, and then no request overtakes it; or `NotYet`, and then others pass it.  `NotYet` comes before
        False, which can preempt running requests: one that cannot start must not cause that.

        Args:
            prefix: the blocks that the prefix cache would give it.
        """


class LoadShares(Protocol):
    """Fair shares, as the loads that requests cause need them; a request stands for its tenant."""

    def account(self, request: Request) -> str:
        """Name of the account that pays for what the request causes."""

    def is_next(self, request: Request) -> bool:
        """Whether no other tenant with requests that may start goes before the request's."""

    def goes_before(self, request: Request, other: Request) -> bool:
        """See `Rank`."""

    def charge(self, request: Request, tokens: float) -> None:
        """Count the cost of something else as if it were so many tokens; a negative one corrects an estimate."""


class BudgetPolicy(Protocol):
    """How many tokens of prompts a step computes beside its decodes.

    Decodes (one token each) need no grant: they come first in every step.
    """

    def grant(self, request: Request, missing: int, limit: int) -> int:
        """How many of its `missing` tokens, which are not computed yet, the request gets in this step.

        At most `limit`, for which the step has room; 0 passes the request over.
        """


class TurnPolicy(Protocol):
    """Which running requests are in the next step."""

    def take(self, running: Sequence[Request]) -> list[Request]:
        """The requests of the next step, in the order of `running`; the others keep their slots and blocks.

        At least one, if any runs, and each within a bounded number of steps.
        """


@dataclass
class Policies:
    """One answer to each of the scheduler's questions; `defaults.py` has the simplest ones.

    Attributes:
        urgency: None: running requests get their tokens first.
        draft_counts: of `drafter`.
        tier_totals: returns what KV tiers have done; None: there are none.
        kv_event_totals: returns how many batches of KV events were published, and how many dropped.
        listeners: receive the events; they include the policies that learn from them.
    """

    order: OrderPolicy
    victim: VictimPolicy
    admission: AdmissionPolicy
    turns: TurnPolicy
    budget: BudgetPolicy
    urgency: UrgencyPolicy | None = None
    drafter: Drafter | None = None
    draft_counts: DraftCounts = field(default_factory=DraftCounts)
    tier_totals: Callable[[], TierTotals | None] = lambda: None
    kv_event_totals: Callable[[], tuple[int, int]] = lambda: (0, 0)
    listeners: Sequence[EngineListener] = ()
