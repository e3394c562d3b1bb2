"""Who gives up its blocks when a running request needs one and none is left.

Whatever the answer, there is no livelock: a preempted request comes back only when the blocks of all
its tokens are there, which is more than it gave up, so others must have ended or given way before,
and the last one running always finds room (`SchedulerLimits` and pool hold one request of any length).
"""

from __future__ import annotations

from collections.abc import Sequence

from inflight.config import EngineConfig
from inflight.engine.policies.base import VictimPolicy, last_in_order
from inflight.engine.request import Request

__all__ = ["VICTIM_POLICIES", "least_preempted", "longest", "lowest_priority", "make_victim"]


def lowest_priority(candidates: Sequence[Request]) -> Request:
    """Of the least urgent class, however long it has waited, the latest arrival."""
    return max(candidates, key=lambda request: (request.priority, request.arrival_time, request.request_id))


def longest(candidates: Sequence[Request]) -> Request:
    """The one with most tokens: the fewest are preempted, but the longest ones end last."""
    return max(candidates, key=lambda request: (request.num_tokens, request.arrival_time, request.request_id))


def least_preempted(candidates: Sequence[Request]) -> Request:
    """The one that was preempted least, then the latest arrival: nobody pays over and over."""
    return max(candidates, key=lambda r: (-r.num_preemptions, r.priority, r.arrival_time, r.request_id))


VICTIM_POLICIES: dict[str, VictimPolicy] = {
    "last": last_in_order,
    "lowest_priority": lowest_priority,
    "longest": longest,
    "least_preempted": least_preempted,
}


def make_victim(config: EngineConfig) -> VictimPolicy:
    """The victim policy that `model.json` chooses."""
    return VICTIM_POLICIES[config.preemption_victim]
