"""Which running requests are in a step, when one of them has many sequences.

All running sequences are in every step, as a rule: on most devices another row costs little.  But not
nothing: a request with `n` = 48 makes the steps of another request with a single sequence several times longer.
`RowShares` bounds the rows that one request adds to a step with others.  Pure Python, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from inflight.config import EngineConfig
from inflight.engine.policies.base import TurnPolicy
from inflight.engine.policies.defaults import EveryStep
from inflight.engine.request import Request

__all__ = ["RowShares", "make_turns"]

_SHARE = 2  # a request's rows for each row of the narrower requests together
_index = attrgetter("index")


def make_turns(config: EngineConfig) -> TurnPolicy:
    """The turn policy that `model.json` chooses."""
    return EveryStep() if config.shared_step_rows is None else RowShares(config.shared_step_rows)


class RowShares:
    """Beside others, a request has at most twice the rows of all narrower requests together, or `least` if more.

    So a step has at most three times the rows that it would have without its widest request, or `least` more; and a
    request without narrower ones beside it has all of its rows.  Its sequences take turns: with
    k rows for s sequences, each is in k of s steps.

    Args:
        least: rows that any request can have in a step.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._next: dict[int, int] = {}  # by limited request: place of its first sequence in the next step

    def take(self, running: Sequence[Request]) -> list[Request]:
        if len(running) <= self._least or not any(map(_index, running)):  # the usual case, quickly recognised
            return list(running)
        sequences: dict[int, list[Request]] = {}
        for request in running:
            sequences.setdefault(request.request_id, []).append(request)
        before, self._next = self._next, {}
        waiting: set[Request] = set()
        narrower = 0
        for request_id, mine in sorted(sequences.items(), key=lambda item: len(item[1])):
            count = min(len(mine), max(self._least, _SHARE * narrower)) if narrower else len(mine)
            if count < len(mine):
                first = before.get(request_id, 0) % len(mine)
                self._next[request_id] = first + count
                waiting.update((mine[first:] + mine[:first])[count:])
            narrower += count
        return [request for request in running if request not in waiting]
