"""The order of requests, beyond first come, first served.  Pure Python, no torch.

Every `scheduling_policy` gives each request a patience in seconds.  A request is *due* once it has waited that
long, and the request that is due first goes first:

    policy      patience of a request
    fcfs        0
    priority    its class * priority_aging_seconds                      (a smaller class is sooner)
    sjf         the most output tokens it may take * sjf_aging_seconds  (shortest job first)
    edf         from arrival to its deadline, or edf_default_timeout    (earliest deadline first)

Due times never change.  So the queue is a sorted list that no step has to search, and no request starves:
only a request s that arrives less than patience(r) - patience(s) seconds after a request r can overtake it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence

from inflight.config import EngineConfig
from inflight.engine.request import Request

__all__ = ["DueOrder", "Patience", "make_patience"]

Patience = Callable[[Request], float]


def make_patience(config: EngineConfig) -> Patience:
    """Seconds after a request's arrival until it is due, under `scheduling_policy`."""
    aging, per_token, default = config.priority_aging_seconds, config.sjf_aging_seconds, config.edf_default_timeout

    def until_deadline(request: Request) -> float:
        return default if request.deadline is None else request.deadline - request.arrival_time

    patiences: dict[str, Patience] = {
        "fcfs": lambda request: 0.0,
        "priority": lambda request: request.priority * aging,
        "sjf": lambda request: (request.max_total_tokens - request.num_prompt_tokens) * per_token,
        "edf": until_deadline,
    }
    return patiences[config.scheduling_policy]


class DueOrder:
    """The request that is due first goes first; ties go by request id and index.

    With `preempts` a waiting request may take the place of a running one that is of a *strictly lower class
    and due later*.  Both orders are fixed, so two requests never preempt each other in turn, and an overdue
    request is not preempted by later arrivals.

    Args:
        patience: seconds after a request's arrival until it is due; constant for a request.
        preempts: whether urgent classes preempt others (`scheduling_policy` "priority").
    """

    def __init__(self, patience: Patience, *, preempts: bool = False) -> None:
        self.preempts = preempts
        self._patience = patience
        self._queue: list[tuple[float, int, int, Request]] = []  # sorted; (request_id, index) is unique
        self._entries: dict[Request, tuple[float, int, int, Request]] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._entries)

    def __contains__(self, request: object) -> bool:
        return request in self._entries

    def __getitem__(self, index: int) -> Request:
        """The `index`-th request in line."""
        return self._queue[index][3]

    def due(self, request: Request) -> float:
        """When the request's patience is over, on the clock of its arrival time."""
        return request.arrival_time + self._patience(request)

    def add(self, request: Request) -> None:
        entry = (self.due(request), request.request_id, request.index, request)
        self._entries[request] = entry
        insort(self._queue, entry)

    def add_first(self, request: Request) -> None:
        """The request returns to its old place: its arrival time, and so its due time, has not changed."""
        self.add(request)

    def next_requests(self, limit: int) -> list[Request]:
        return [entry[3] for entry in self._queue[:limit]]

    def remove(self, request: Request) -> None:
        del self._queue[bisect_left(self._queue, self._entries.pop(request))]

    def ahead(self, request: Request) -> list[Request]:
        end = bisect_left(self._queue, (self.due(request), request.request_id, request.index))
        return [entry[3] for entry in self._queue[:end]]

    def goes_before(self, request: Request, other: Request) -> bool:
        return self.due(request) < self.due(other)

    def position(self, request: Request, running: Sequence[Request]) -> int:
        """Running requests have the order of the queue; the last ones give way first."""
        return bisect_right(running, self.due(request), key=self.due)

    def outranked(self, request: Request, running: Sequence[Request]) -> Iterator[Request]:
        if not self.preempts:
            return
        due = self.due(request)
        for other in reversed(running):
            if self.due(other) <= due:
                return
            if other.priority > request.priority:
                yield other
