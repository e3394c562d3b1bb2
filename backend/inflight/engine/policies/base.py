"""Where the scheduler has a choice: who is next, gives way, may start, is in a step; how much at once, what to draft.

`Scheduler.schedule()` asks these questions and nothing else; a new answer is a new class here or in a file
of its own, never a branch there.  `Policies` holds one answer to each; `selection.py` builds what
`model.json` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from inflight.engine.drafting.drafter import DraftCounts, Drafter
from inflight.engine.events import EngineListener
from inflight.engine.kv_pool import KVPool
from inflight.engine.messages import RequestFailed
from inflight.engine.request import Request

__all__ = [
    "AdmissionPolicy",
    "ArrivalPolicy",
    "BudgetPolicy",
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
    """Holds the waiting requests and says which are next; called by the scheduler alone."""

    def __len__(self) -> int:
        """Requests waiting."""

    def __iter__(self) -> Iterator[Request]:
        """Waiting requests, in any order."""

    def __contains__(self, request: object) -> bool:
        """Whether it waits here."""

    def add(self, request: Request) -> None:
        """Queue a request that just arrived."""

    def add_first(self, request: Request) -> None:
        """Queue a request that was already admitted once (preempted), or whose leader was."""

    def next_requests(self, limit: int) -> list[Request]:
        """Up to `limit` requests in the order in which to admit them, all of which may run now."""

    def remove(self, request: Request) -> None:
        """Take a request out: it is admitted or aborted."""


class Rank(Protocol):
    """Which of two requests goes first.  The relation has no cycles."""

    def ahead(self, request: Request) -> list[Request]:
        """Waiting requests that would be admitted before `request`, which is not queued, if no other arrived."""

    def position(self, request: Request, running: Sequence[Request]) -> int:
        """Where in `running` it goes: the first one there has the first tokens of a step."""

    def outranked(self, request: Request, running: Sequence[Request]) -> Iterator[Request]:
        """The running requests that give way to the waiting `request` where room is lacking, in this order.

        After giving way a request is next only after `request`.
        """


class OrderPolicy(RequestQueue, Rank, Protocol):
    """Both, over the same requests."""


class UrgencyPolicy(Protocol):
    """Which waiting requests start before the running ones get their tokens of a step, even in place of some."""

    def next_requests(self, running: Sequence[Request]) -> list[Request]:
        """Waiting requests, the first one first; each outranks a running request, or ends the list for this step."""

    def giving_way(
        self,
        request: Request,
        prefix: Sequence[int],
        beside: Sequence[Request],
        victims: Sequence[Request],
        pool: KVPool,
    ) -> Sequence[Request]:
        """Those of `victims`, which it outranks, to preempt until `request` finds room; none if all are not enough.

        Args:
            prefix: the blocks that the prefix cache would give it.
            beside: the running requests that keep what they have.
        """


# Who gives up its blocks, of requests (in the order of `OrderPolicy.position`) not yet in this step.
VictimPolicy = Callable[[Sequence[Request]], Request]


@dataclass(frozen=True)
class NotYet:
    """A request waits for something outside of the engine: a grammar that compiles, KV that arrives.

    Attributes:
        reason: what it waits for, for the message of its failure.
        seconds: how long it may wait before it fails.
        failure: why it never will start, in words for the client (INVALID_ARG); "" while it may.
    """

    reason: str
    seconds: float
    failure: str = ""


class ArrivalPolicy(Protocol):
    """Whether a request is taken at all."""

    def refusal(self, sequences: Sequence[Request], failure: RequestFailed | None) -> RequestFailed | None:
        """Why the sequences of a request that arrives are not taken; None if they are.

        Args:
            failure: why they are refused anyway; the answer can only add to it.
        """


class AdmissionPolicy(Protocol):
    """Whether a waiting request may start now."""

    def admits(
        self, request: Request, prefix: Sequence[int], running: Sequence[Request], pool: KVPool
    ) -> bool | NotYet:
        """Whether it may start beside `running`: all running requests, or those that will not give way to it.

        Yes; no, and then nobody overtakes it; or not yet, and then others pass it.  Not yet comes before no: a
        no may have running requests preempted, which a request that cannot start is not worth.

        Args:
            prefix: the blocks that the prefix cache would give it.
        """


class BudgetPolicy(Protocol):
    """How many tokens of prompts a step computes beside its decodes.

    Decodes (one token each) are never asked about: they come first in every step.
    """

    def grant(self, request: Request, missing: int, limit: int) -> int:
        """How many of the `missing` tokens that the request has yet to compute it gets in this step.

        Up to `limit`, for which the step has room; 0 passes it over.
        """


class TurnPolicy(Protocol):
    """Which running requests are in the next step."""

    def take(self, running: Sequence[Request]) -> list[Request]:
        """Those in the next step, in the order of `running`; the others keep what they hold.

        At least one of them, if any runs, and each within a bounded number of steps.
        """


@dataclass
class Policies:
    """One answer to each of the scheduler's questions; `defaults.py` has the simplest ones.

    Attributes:
        urgency: None: no waiting request displaces a running one.
        draft_counts: of `drafter`.
        listeners: are told what happens; the answers that learn from it are among them.
    """

    order: OrderPolicy
    victim: VictimPolicy
    admission: AdmissionPolicy
    turns: TurnPolicy
    budget: BudgetPolicy
    urgency: UrgencyPolicy | None = None
    drafter: Drafter | None = None
    draft_counts: DraftCounts = field(default_factory=DraftCounts)
    listeners: Sequence[EngineListener] = ()
