"""Which running requests are in a step, when one of them has many sequences.

All running sequences are in every step, as a rule: on most devices another row costs little.  But not
nothing: a request with `n` = 48 makes the steps of another request with a single sequence several times longer.
`RowShares` bounds the rows that one request adds to a step with others.  Pure Python, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from inflight.config import EngineConfig
from inflight.engine.events import DoneStep, EngineListener
from inflight.engine.policies.base import TurnPolicy
from inflight.engine.policies.cost_model import OnlineStepCost, step_load
from inflight.engine.policies.defaults import EveryStep
from inflight.engine.request import Request

__all__ = ["RowShares", "make_turns"]

_SHARE = 2  # a request's rows for each row of the narrower requests together
_SLOWDOWN = 3  # times that a step with one row of a request, for all of its rows beside others
_FEW = 4  # a step with fewer rows of a request never takes `_SLOWDOWN` times as long as with one
_index = attrgetter("index")
_num_tokens = attrgetter("num_tokens")


def make_turns(config: EngineConfig, listeners: list[EngineListener]) -> TurnPolicy:
    """The turn policy that `model.json` chooses; if it learns from steps, it joins `listeners`."""
    if config.shared_step_rows is None:
        return EveryStep()
    shares = RowShares(config.shared_step_rows)
    listeners.append(shares)
    return shares


class RowShares(EngineListener):
    """Beside others, a request has `most` rows, or twice the rows of all narrower requests together if that is more.

    It has fewer than `most` if a step with so many takes more than three times as long as with one of its rows, by
    the steps measured while a request had several sequences.  So a step takes about three times as long as it would
    with a single sequence of its widest request, where a row is dear (a CPU), and has at most `most` more rows where
    it is cheap; and a request without narrower ones beside it has all of its rows.  Its sequences take turns: with k
    rows for s sequences, each is in k of s steps.

    Args:
        most: rows that any request can have in a step.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._next: dict[int, int] = {}  # by limited request: place of its first sequence in the next step
        self._cost = OnlineStepCost()
        self._learns = False  # the last step had a request of several sequences: others teach nothing, and cost time

    def take(self, running: Sequence[Request]) -> list[Request]:
        self._learns = len(running) > min(_FEW, self._most) and any(map(_index, running))
        if not self._learns:  # the usual case, quickly recognised
            return list(running)
        sequences: dict[int, list[Request]] = {}
        for request in running:
            sequences.setdefault(request.request_id, []).append(request)
        before, self._next = self._next, {}
        waiting: set[Request] = set()
        narrower: list[Request] = []
        for request_id, mine in sorted(sequences.items(), key=lambda item: len(item[1])):
            count = len(mine)
            if narrower and count > _SHARE * len(narrower):
                count = min(count, max(self._affordable(mine, narrower), _SHARE * len(narrower)))
            if count < len(mine):
                first = before.get(request_id, 0) % len(mine)
                self._next[request_id] = first + count
                mine = mine[first:] + mine[:first]
                waiting.update(mine[count:])
            narrower += mine[:count]
        return [request for request in running if request not in waiting]

    def _affordable(self, mine: Sequence[Request], others: Sequence[Request]) -> int:
        """Rows of a request with which a step takes `_SLOWDOWN` times as long as with one of them, at most `most`."""
        cost = self._cost.cost
        row = cost.per_sequence + cost.per_context_token * sum(map(_num_tokens, mine)) / len(mine)
        if row <= 0.0:  # free, or not measured yet
            return self._most
        rest = cost.seconds_at[0] + cost.per_sequence * len(others)
        rest += cost.per_context_token * sum(map(_num_tokens, others))
        return int(min(self._most, _SLOWDOWN + (_SLOWDOWN - 1) * rest / row))

    def step_done(self, step: DoneStep) -> None:
        if self._learns:
            self._cost.observe(step_load(step.out), step.result.ended - step.result.started)
