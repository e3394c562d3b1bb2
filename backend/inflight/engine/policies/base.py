"""Where the scheduler has a choice: who is next, gives way, may start, is in a step; how much at once, what to draft.

`Scheduler.schedule()` asks these questions and nothing else; a new answer is a new class here or in a file
of its own, never a branch there.  `Policies` holds one answer to each; `selection.py` builds what
`model.json` chooses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from inflight.engine.drafting.drafter import DraftCounts, Drafter
from inflight.engine.kv_pool import KVPool
from inflight.engine.request import Request
from inflight.engine.step import SchedulerOutput

__all__ = [
    "AdmissionPolicy",
    "BudgetPolicy",
    "EveryStep",
    "FcfsOrder",
    "FreeBlocksAdmission",
    "NotYet",
    "OrderPolicy",
    "Policies",
    "StaticBudget",
    "TurnPolicy",
    "VictimPolicy",
    "last_in_order",
]


class OrderPolicy(Protocol):
    """Holds the waiting requests and says which are next; called by the scheduler alone.

    Attributes:
        preempts: whether a waiting request may ever outrank a running one.
    """

    preempts: bool

    def __len__(self) -> int:
        """Requests waiting."""

    def __iter__(self) -> Iterator[Request]:
        """Waiting requests, in any order."""

    def add(self, request: Request) -> None:
        """Queue a request that just arrived."""

    def add_first(self, request: Request) -> None:
        """Queue a request that was already admitted once (preempted), or whose leader was."""

    def next_requests(self, limit: int) -> list[Request]:
        """Up to `limit` requests in the order in which to admit them, all of which may run now."""

    def remove(self, request: Request) -> None:
        """Take a request out: it is admitted or aborted."""

    def ahead(self, request: Request) -> list[Request]:
        """Waiting requests that would be admitted before `request`, which is not queued, if nobody else came."""

    def position(self, request: Request, running: Sequence[Request]) -> int:
        """Where in `running` it goes: who stands there first has the first tokens of a step."""

    def outranked(self, request: Request, running: Sequence[Request]) -> Iterator[Request]:
        """The running requests that give way to the waiting `request` where room is lacking, in this order.

        The relation has no cycles, and after giving way a request is next only after `request`.
        """

    def admitted(self, request: Request) -> None:
        """It runs from now on; `num_computed_tokens` is what it need not compute."""

    def left(self, request: Request) -> None:
        """It no longer runs: finished, aborted or preempted; `num_computed_tokens` is what it was."""


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


class AdmissionPolicy(Protocol):
    """Whether a waiting request may start now."""

    def begin(self) -> None:
        """A step is about to be made."""

    def admits(
        self, request: Request, prefix: Sequence[int], running: Sequence[Request], pool: KVPool
    ) -> bool | NotYet:
        """Whether it may start beside `running`: all running requests, or those that will not give way to it.

        Yes; no, and then nobody overtakes it; or not yet, and then others pass it.  Not yet comes before no: a
        no may have running requests preempted, which a request that cannot start is not worth.

        Args:
            prefix: the blocks that the prefix cache would give it.
        """

    def admitted(self, request: Request, prefix: Sequence[int], pool: KVPool) -> None:
        """It runs from now on, with `prefix` of the prefix cache."""

    def left(self, request: Request) -> None:
        """It no longer runs: finished, aborted or preempted."""

    def ended(self, request: Request) -> None:
        """A request that was admitted once has ended, by itself or aborted."""


class BudgetPolicy(Protocol):
    """How many tokens of prompts a step computes beside its decodes.

    Decodes (one token each) are never asked about: they come first in every step.
    """

    def begin(self, running: Sequence[Request]) -> None:
        """A step is about to be made."""

    def grant(self, request: Request, missing: int, limit: int) -> int:
        """How many of the `missing` tokens that the request has yet to compute it gets in this step.

        Up to `limit`, for which the step has room; 0 passes it over.
        """

    def observe(self, out: SchedulerOutput, seconds: float) -> None:
        """The step took this long, from its start on the device to its tokens."""


class TurnPolicy(Protocol):
    """Which running requests are in the next step."""

    def take(self, running: Sequence[Request]) -> list[Request]:
        """Those in the next step, in the order of `running`; the others keep what they hold.

        At least one of them, if any runs, and each within a bounded number of steps.
        """


class EveryStep:
    """All of them."""

    def take(self, running: Sequence[Request]) -> list[Request]:
        return list(running)


class FcfsOrder:
    """First come, first served."""

    preempts = False

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    def add(self, request: Request) -> None:
        self._queue.append(request)

    def add_first(self, request: Request) -> None:
        self._queue.appendleft(request)

    def next_requests(self, limit: int) -> list[Request]:
        return list(islice(self._queue, limit))

    def remove(self, request: Request) -> None:
        if self._queue[0] is request:
            self._queue.popleft()
        else:
            self._queue.remove(request)

    def ahead(self, request: Request) -> list[Request]:
        return list(self._queue)

    def position(self, request: Request, running: Sequence[Request]) -> int:
        return len(running)

    def outranked(self, request: Request, running: Sequence[Request]) -> Iterator[Request]:
        return iter(())

    def admitted(self, request: Request) -> None:
        pass

    def left(self, request: Request) -> None:
        pass


def last_in_order(candidates: Sequence[Request]) -> Request:
    """Whom the order policy ranks last: the latest admitted under fcfs, of the least urgent class under
    priority.  Those ahead of it never lose blocks to it, so what the order says of starvation holds."""
    return candidates[-1]


class FreeBlocksAdmission:
    """Admits while the blocks of all the request's present tokens and one more are available.

    They are not reserved, but a request that could not even finish its prompt would only be
    preempted again.

    Args:
        watermark: share of the pool's blocks that stays free for those that run; nobody needs it kept
            while none runs.
    """

    def __init__(self, watermark: float = 0.0) -> None:
        self._watermark = watermark

    def begin(self) -> None:
        pass

    def admits(self, request: Request, prefix: Sequence[int], running: Sequence[Request], pool: KVPool) -> bool:
        kept = int(self._watermark * pool.num_blocks) if running else 0
        return pool.missing_blocks(request, prefix) + kept <= pool.num_available

    def admitted(self, request: Request, prefix: Sequence[int], pool: KVPool) -> None:
        pass

    def left(self, request: Request) -> None:
        pass

    def ended(self, request: Request) -> None:
        pass


class StaticBudget:
    """As many as the step's budget has left."""

    def begin(self, running: Sequence[Request]) -> None:
        pass

    def grant(self, request: Request, missing: int, limit: int) -> int:
        return limit

    def observe(self, out: SchedulerOutput, seconds: float) -> None:
        pass


@dataclass
class Policies:
    """One answer to each of the scheduler's questions; the defaults here are the simplest ones."""

    order: OrderPolicy = field(default_factory=FcfsOrder)
    victim: VictimPolicy = last_in_order
    admission: AdmissionPolicy = field(default_factory=FreeBlocksAdmission)
    turns: TurnPolicy = field(default_factory=EveryStep)
    budget: BudgetPolicy = field(default_factory=StaticBudget)
    drafter: Drafter | None = None
    draft_counts: DraftCounts = field(default_factory=DraftCounts)
